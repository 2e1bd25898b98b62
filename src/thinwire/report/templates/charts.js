// Puts a chart that can be asked in the place of each picture that has data: hover for values, hide
// methods, linear or logarithmic axes. Without it, and on paper, the pictures are there. A method
// that is hidden is so in all charts of its section of the page, or of the page if it has none.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 44;
  const NS = "http" + "://www.w3.org/2000/svg";
  const hiddenIn = new Map();  // section: names of methods
  const redraws = [];

  const el = (name, attributes = {}, ...children) => {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const shape = (parent, name, attributes, text) => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  };
  const show = value => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  };

  // Where a value lies between the ends of an axis, from 0 to 1, and where its ticks are.
  const scale = (low, high, log) => {
    if (log) {
      const a = Math.log(low), b = Math.log(high);
      return value => (Math.log(value) - a) / (b - a || 1);
    }
    return value => (value - low) / (high - low || 1);
  };
  const ticks = (low, high, log) => {
    const found = [];
    if (log) {
      const few = high / low < 1500;
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
        for (const digit of few ? [1, 2, 5] : [1]) found.push(digit * 10 ** power);
    } else {
      const rough = (high - low) / 5 || 1, base = 10 ** Math.floor(Math.log10(rough));
      const step = base * [1, 2, 5, 10].find(each => each * base >= rough);
      for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
    }
    return found.filter(value => value >= low && value <= high);
  };

  for (const [name, chart] of Object.entries(charts)) {
    const figure = document.getElementById(`figure-${name}`);
    if (!figure) continue;
    const section = figure.closest("section");
    if (!hiddenIn.has(section)) hiddenIn.set(section, new Set());
    const hidden = hiddenIn.get(section);
    const log = { x: chart.log[0], y: chart.log[1] };
    const svg = document.createElementNS(NS, "svg");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", figure.querySelector("svg").getAttribute("aria-label"));
    const tip = el("div", { class: "tip", role: "status" });
    const box = el("div", { class: "plot" }, svg, tip);
    const bar = el("div", { class: "bar" });
    const legend = el("div", { class: "legend" });
    let place = null, W = 640, H = 400;

    const button = (text, pressed, act) => {
      const made = el("button", { type: "button", "aria-pressed": String(pressed()) }, text);
      made.addEventListener("click", () => { act(); redraws.forEach(each => each()); });
      redraws.push(() => made.setAttribute("aria-pressed", String(pressed())));
      return made;
    };
    const positive = axis => chart.series.some(s => s.points.some(p => p[axis === "x" ? 0 : 1] > 0));
    for (const axis of ["x", "y"])
      if (positive(axis))
        bar.append(button(`${axis} logarithmic`, () => log[axis], () => { log[axis] = !log[axis]; }));
    for (const series of chart.series) {
      const made = button(series.name, () => !hidden.has(series.name), () => {
        if (!hidden.delete(series.name)) hidden.add(series.name);
      });
      const line = el("i", { style: `border-top: 3px ${series.dash ? "dashed" : "solid"} ${series.color}` });
      made.prepend(line);
      legend.append(made);
    }

    const draw = () => {
      svg.replaceChildren();
      W = Math.max(300, svg.clientWidth || 640);  // letters keep their size on a narrow screen
      H = Math.round(Math.max(0.62 * W, 240));
      svg.setAttribute("viewBox", `0 0 ${W} ${H}`);
      tip.hidden = true;
      place = null;
      const seen = chart.series.filter(series => !hidden.has(series.name)).map(series => ({
        ...series,
        points: series.points.filter(p => p[1] !== null && (!log.x || p[0] > 0) && (!log.y || p[1] > 0)),
      })).filter(series => series.points.length);
      if (!seen.length) {
        shape(svg, "text", { x: W / 2, y: H / 2, "text-anchor": "middle" }, "all methods are hidden");
        return;
      }
      // Methods that diverged do not set the scale, unless nothing else is shown.
      const steady = seen.filter(series => !series.diverged);
      const fitted = (steady.length ? steady : seen).flatMap(series => series.points);
      const all = seen.flatMap(series => series.points);
      const xs = all.map(p => p[0]), ys = fitted.flatMap(p => p.length > 2 ? [p[2], p[3]] : [p[1]]);
      let x0 = log.x ? Math.min(...xs) : Math.min(0, ...xs), x1 = Math.max(...xs);
      const usable = ys.filter(y => y !== null && (!log.y || y > 0));
      let y0 = Math.min(...usable), y1 = Math.max(...usable);
      if (log.y) { y0 /= 1.1; y1 *= 1.1; } else {
        const edge = 0.04 * (y1 - y0) || 0.05 * Math.abs(y1) || 1;
        y0 -= edge; y1 += edge;
      }
      if (x0 === x1) { x0 = log.x ? x0 / 2 : x0 - 1; x1 = log.x ? x1 * 2 : x1 + 1; }
      const sx = scale(x0, x1, log.x), sy = scale(y0, y1, log.y);
      const X = value => LEFT + sx(value) * (W - LEFT - RIGHT);
      const Y = value => H - BOTTOM - sy(value) * (H - TOP - BOTTOM);
      for (const value of ticks(x0, x1, log.x)) {
        shape(svg, "line", { x1: X(value), x2: X(value), y1: TOP, y2: H - BOTTOM, class: "grid" });
        shape(svg, "text", { x: X(value), y: H - BOTTOM + 16, "text-anchor": "middle" }, show(value));
      }
      for (const value of ticks(y0, y1, log.y)) {
        shape(svg, "line", { x1: LEFT, x2: W - RIGHT, y1: Y(value), y2: Y(value), class: "grid" });
        shape(svg, "text", { x: LEFT - 6, y: Y(value) + 4, "text-anchor": "end" }, show(value));
      }
      shape(svg, "text", { x: (LEFT + W - RIGHT) / 2, y: H - 8, "text-anchor": "middle" }, chart.x);
      shape(svg, "text", { transform: `translate(14 ${(TOP + H - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.y);
      const clip = shape(svg, "clipPath", { id: `clip-${name}` });
      shape(clip, "rect", { x: LEFT, y: TOP, width: W - LEFT - RIGHT, height: H - TOP - BOTTOM });
      const inside = shape(svg, "g", { "clip-path": `url(#clip-${name})` });
      for (const series of seen) {
        const path = (points, at) => points.map(p => `${X(p[0]).toFixed(1)} ${Y(p[at]).toFixed(1)}`);
        const band = series.points.filter(p => p.length > 2 && p[2] !== null && (!log.y || p[2] > 0));
        if (band.length > 1) {
          const around = [...path(band, 2), ...path(band, 3).reverse()];
          shape(inside, "path", { d: `M${around.join("L")}Z`, fill: series.color, opacity: 0.12 });
        }
        const line = { d: `M${path(series.points, 1).join("L")}`, fill: "none", stroke: series.color };
        shape(inside, "path", { ...line, "stroke-width": series.width * 1.4, "stroke-dasharray": series.dash || "none" });
      }
      const dot = shape(svg, "circle", { r: 5, class: "dot", visibility: "hidden" });
      place = (x, y) => {
        let best = null, least = 40 ** 2;
        for (const series of seen)
          for (const p of series.points) {
            const distance = (X(p[0]) - x) ** 2 + (Y(p[1]) - y) ** 2;
            if (distance < least) { least = distance; best = [series, p]; }
          }
        dot.setAttribute("visibility", best ? "visible" : "hidden");
        tip.hidden = !best;
        if (!best) return;
        const [series, p] = best;
        dot.setAttribute("cx", X(p[0]));
        dot.setAttribute("cy", Y(p[1]));
        dot.setAttribute("fill", series.color);
        const spread = p.length > 2 && p[2] !== p[3] ? ` (${show(p[2])} to ${show(p[3])})` : "";
        tip.textContent = `${series.name}: ${show(p[1])}${spread} at ${show(p[0])} (${chart.x})`;
        tip.style.left = `${Math.min(60, 100 * X(p[0]) / W)}%`;
        tip.style.top = `${100 * (Y(p[1]) + 10) / H}%`;
      };
    };
    redraws.push(draw);
    svg.addEventListener("pointermove", event => {
      const frame = svg.getBoundingClientRect();
      if (place) place((event.clientX - frame.left) * W / frame.width, (event.clientY - frame.top) * H / frame.height);
    });
    svg.addEventListener("pointerleave", () => { if (place) place(-1e6, -1e6); });
    figure.querySelector("h3").after(el("div", { class: "chart" }, bar, box, legend));
    figure.classList.add("live");
    draw();
    addEventListener("resize", draw);
  }
})();
