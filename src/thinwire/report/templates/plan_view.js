"use strict";
/* What the page shows of the formulas: sliders, curves, a table. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { stepOf, breakEven, at } = planner(data.constants);
  const methods = data.methods, plain = methods[0];
  const $ = id => document.getElementById(id);

  // Numbers as thinwire.formatting writes them.
  const three = value => String(Number(value.toPrecision(3)));
  const scaled = (value, units) => {
    for (const [unit, factor] of units) if (value >= 0.9995 * factor) return `${three(value / factor)} ${unit}`;
    const [unit, factor] = units[units.length - 1];
    return `${three(value / factor)} ${unit}`;
  };
  const showSeconds = s => s === 0 ? "0 ms" : scaled(s, [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]);
  const showRate = b => scaled(b, [["Tbit/s", 1e12], ["Gbit/s", 1e9], ["Mbit/s", 1e6], ["kbit/s", 1e3]]);
  const showBytes = b => scaled(b, [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3], ["B", 1]]);
  const showCount = n => n >= 1e9 ? `${three(n / 1e9)}G` : n >= 1e6 ? `${three(n / 1e6)}M` : n >= 1e3 ? `${three(n / 1e3)}k` : String(n);

  // A slider's position is the logarithm of what it stands for; whole ones are rounded, and the
  // lowest of some stands for nothing.
  const sliders = {
    rate: { show: showRate }, delay: { show: s => `${showSeconds(s)} one way`, zero: true },
    hosts: { show: String, whole: true }, ranks_per_host: { show: String, whole: true },
    parameters: { show: showCount, whole: true }, step: { show: showSeconds },
  };
  const valueOf = name => {
    const { whole, zero } = sliders[name], raw = 10 ** Number($(name).value);
    if (zero && raw <= 10 ** Number($(name).min) * 1.0001) return 0;
    return whole ? Math.round(raw) : Number(raw.toPrecision(3));
  };
  function place(name, value) {
    $(name).value = value ? Math.log10(value) : $(name).min;
  }
  function settingNow() {
    const network = {
      ...data.network, rate: valueOf("rate") / 8, delay: valueOf("delay"), hosts: valueOf("hosts"),
      ranks_per_host: valueOf("ranks_per_host"), trees: $("trees").checked,
    };
    for (const name of ["uplink", "together"]) network[name] ??= Infinity;
    return {
      network, parameters: valueOf("parameters"), compute: valueOf("step"), busy: data.busy,
      nodes: $("nodes").checked,
    };
  }

  // Curves
  const NS = "http://www.w3.org/2000/svg";
  function element(parent, name, attributes, text) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }
  const MARKS = [
    "M-4-4h8v8h-8z", "M0-5L5 4H-5z", "M0-5L5 0 0 5-5 0z", "M-5-1h4v-4h2v4h4v2h-4v4h-2v-4h-4z",
    "M0 5L5-4H-5z", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
  ];
  const DASHES = ["", "7 3", "2 3"];
  const look = i => ({
    // The darkest of them is lighter on dark paper.
    color: i ? data.colors[(i - 1) % data.colors.length].replace("#0072B2", "var(--blue)") : "currentColor",
    mark: MARKS[i % MARKS.length], dash: i ? DASHES[Math.floor((i - 1) / data.colors.length) % 3] : "9 4",
  });
  const W = 560, H = 340, L = 74, R = 14, T = 12, B = 44;

  function draw(svg, curves, chosen, options) {
    const { low, high, logarithmic, ticks, show, here, even } = options;
    svg.replaceChildren();
    const [x0, x1] = [Math.log10(data.range[0]), Math.log10(data.range[1])];
    const px = bits => L + (Math.log10(bits) - x0) / (x1 - x0) * (W - L - R);
    const scale = logarithmic ? Math.log10 : v => v;
    const py = v => H - B - (scale(Math.max(v, low)) - scale(low)) / (scale(high) - scale(low)) * (H - B - T);
    for (let k = Math.ceil(x0); k <= x1; k++) {
      element(svg, "line", { x1: px(10 ** k), x2: px(10 ** k), y1: T, y2: H - B, class: "grid" });
      element(svg, "text", { x: px(10 ** k), y: H - B + 16, "text-anchor": "middle" }, showRate(10 ** k).replace("bit/s", ""));
    }
    for (const v of ticks) {
      element(svg, "line", { x1: L, x2: W - R, y1: py(v), y2: py(v), class: "grid" });
      element(svg, "text", { x: L - 6, y: py(v) + 4, "text-anchor": "end" }, show(v));
    }
    element(svg, "text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, "rate of a host's link, bit/s");
    if (even > data.range[0] && even < data.range[1]) {
      element(svg, "line", { x1: px(even), x2: px(even), y1: T, y2: H - B, class: "even" });
      const left = px(even) > W / 2;
      element(svg, "text", { x: px(even) + (left ? -5 : 5), y: H - B - 6, "text-anchor": left ? "end" : "start", class: "name" }, "break-even");
    }
    if (here >= data.range[0] && here <= data.range[1]) {
      element(svg, "path", { d: `M${px(here)} ${H - B}l-5 8h10z`, class: "here" });
      element(svg, "line", { x1: px(here), x2: px(here), y1: T, y2: H - B, class: "here" });
    }
    curves.forEach(({ points }, i) => {
      const { color, mark, dash } = look(i), main = i === chosen;
      const group = element(svg, "g", { style: `color:${color}`, class: main ? "curve chosen" : i ? "curve" : "curve plain" });
      const path = points.map(([x, y], k) => `${k ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
      element(group, "path", { d: path, "stroke-dasharray": dash, class: "line" });
      if (i) for (let k = (3 * i) % 12; k < points.length; k += 12) {
        const [x, y] = points[k];
        element(group, "path", { d: mark, transform: `translate(${px(x).toFixed(1)} ${py(y).toFixed(1)})`, class: "mark" });
      }
    });
    svg.append(...svg.querySelectorAll(".chosen"));
  }

  function ladder(low, high) {  // powers of ten
    const found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k++) found.push(10 ** k);
    return found;
  }

  function sample(i) {
    const { color, mark, dash } = look(i);
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("viewBox", "0 0 34 12");
    svg.setAttribute("class", "sample");
    svg.setAttribute("aria-hidden", "true");
    const group = element(svg, "g", { style: `color:${color}`, class: "curve" });
    element(group, "path", { d: "M1 6H33", "stroke-dasharray": dash, class: "line" });
    if (i) element(group, "path", { d: mark, transform: "translate(17 6)", class: "mark" });
    return svg;
  }

  function sentence(rows, setting, chosen) {
    const able = rows.filter((row, i) => i && !methods[i].every);
    const best = able.reduce((a, b) => a.cost.seconds <= b.cost.seconds ? a : b, rows[0]);
    const gain = rows[0].cost.seconds / best.cost.seconds;
    const first = gain < data.worth
      ? `Stay with plain ddp: no method of gradients gains 5 % here.`
      : `${best.name} is fastest of those that exchange gradients: ${showSeconds(best.cost.seconds)} per step instead of ${showSeconds(rows[0].cost.seconds)}, ${three(gain)} times faster.`;
    const own = rows[chosen], even = own.even;
    const second = even === Infinity ? `${own.name} pays at any faster link.`
      : even === 0 ? `${own.name} never pays here.`
      : `${own.name} ${even > 8 * setting.network.rate ? "stops paying" : "would pay only up to"} ${even > 8 * setting.network.rate ? `from ${showRate(even)} on` : showRate(even)}.`;
    return `${first} ${second}`;
  }

  function refresh() {
    for (const [name, { show }] of Object.entries(sliders)) {
      const text = show(valueOf(name));
      $(`${name}-value`).textContent = text;
      $(name).setAttribute("aria-valuetext", text);
    }
    const setting = settingNow(), chosen = Number($("method").value);
    const rows = methods.map(method => ({ name: method.name, cost: stepOf(method, setting, data.uncompressed) }));
    rows[chosen].even = breakEven(methods[chosen], plain, setting, data.uncompressed);
    const count = 49, [low, high] = data.range.map(Math.log10);
    const rates = Array.from({ length: count }, (_, k) => 10 ** (low + (high - low) * k / (count - 1)));
    const costs = methods.map(method => rates.map(bits => stepOf(method, at(setting, bits / 8), data.uncompressed)));
    const here = 8 * setting.network.rate, even = rows[chosen].even;
    const all = costs.flat().map(cost => cost.seconds);
    const floor = Math.min(...all), top = Math.max(...all);
    const decades = ladder(floor, top);
    draw($("time"), costs.map(own => ({ points: own.map((c, k) => [rates[k], c.seconds]) })), chosen, {
      low: decades[0], high: decades[decades.length - 1], logarithmic: true, ticks: decades,
      show: showSeconds, here, even,
    });
    draw($("efficiency"), costs.map(own => ({ points: own.map((c, k) => [rates[k], 100 * c.compute / c.seconds]) })), chosen, {
      low: 0, high: 100, logarithmic: false, ticks: [0, 25, 50, 75, 100], show: v => `${v} %`, here, even,
    });
    const ranks = setting.network.hosts * setting.network.ranks_per_host;
    const body = $("rows");
    body.replaceChildren();
    rows.forEach(({ name, cost }, i) => {
      const row = body.insertRow();
      if (i === chosen) row.className = "chosen";
      const head = document.createElement("th");
      head.scope = "row";
      head.append(sample(i), ` ${name}`);
      row.append(head);
      const egress = 1000 * cost.egress * ranks;
      for (const text of [
        showSeconds(cost.seconds), `${three(rows[0].cost.seconds / cost.seconds)}×`,
        `${Math.round(100 * cost.compute / cost.seconds)} %`, showBytes(cost.sent),
        showSeconds(cost.encode), showSeconds(cost.network), showSeconds(cost.decode),
        showSeconds(cost.hidden), showBytes(egress), `$${three(egress / 1e9 * data.price)}`,
      ]) row.insertCell().textContent = text;
    });
    $("advice").textContent = sentence(rows, setting, chosen);
  }

  methods.forEach((method, i) => { if (i) $("method").add(new Option(method.name, i)); });
  $("method").value = String(data.chosen);
  for (const [name, value] of Object.entries(data.begin)) place(name, value);
  $("nodes").checked = data.nodes;
  $("trees").checked = data.network.trees;
  let waiting = false;
  document.addEventListener("input", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; refresh(); });
  });
  refresh();
})();
