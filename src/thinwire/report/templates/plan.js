"use strict";
/* The formulas of thinwire.collectives.costs, thinwire.plan.sizes and thinwire.plan.predict once
   more: tests/test_plan_page.py holds them against each other in a browser. Constants come from
   Python, as C. */
function planner(C) {
  const ranksOf = n => n.hosts * n.ranks_per_host;
  const tripOf = n => 2 * (n.delay + (n.racks > 1 ? n.uplink_delay : 0));
  const aligned = length => Math.ceil(length / C.ALIGNMENT) * C.ALIGNMENT;
  const roomOf = p => Math.min(C.MOST_ROOM, Math.max(C.LEAST_ROOM, aligned(Math.floor(C.ROOM / (p - 1)))));
  const recordBytes = p => aligned(8 * (C.HEADER + C.FIELDS + p));
  const nothing = { seconds: 0, sent: 0, egress: 0, work: 0, rounds: 0, waits: 0, trips: 0 };
  const then = (a, b) => ({
    seconds: a.seconds + b.seconds, sent: a.sent + b.sent, egress: a.egress + b.egress,
    work: a.work + b.work, rounds: a.rounds + b.rounds, waits: a.waits + b.waits,
    trips: a.trips + b.trips,
  });
  function inSlices(a, slices) {
    const moving = slices * (a.seconds - a.waits);
    const seconds = waits => waits + Math.max(moving, (slices - 1) * waits / C.SLICES_AT_ONCE);
    const whole = seconds(a.waits);
    return {
      seconds: whole, sent: slices * a.sent, egress: slices * a.egress, work: slices * a.work,
      rounds: a.rounds, waits: a.waits, trips: whole - seconds(a.waits - a.trips),
    };
  }

  function slowStart(bytes, rate, trip) {
    if (!trip || bytes <= C.FIRST_WINDOW) return 0;
    const allSent = Math.ceil(Math.log2(1 + bytes / C.FIRST_WINDOW)) - 1;
    const linkFull = Math.ceil(Math.log2(Math.max(1, rate * trip / C.FIRST_WINDOW)));
    const j = Math.min(allSent, linkFull);
    return Math.max(0, j * trip - C.FIRST_WINDOW * (2 ** j - 1) / rate);
  }

  const heldUp = (hosts, message) =>
    (1 / (hosts === 2 ? C.PAIR : C.CROWDED) - 1) * Math.min(message, C.HELD);

  function direct(n, message, cold) {
    const p = ranksOf(n), h = n.ranks_per_host;
    if (p === 1) return nothing;
    const out = h * (p - h) * message;
    const inRack = Math.floor(p / n.racks);
    const up = inRack * (p - inRack) * message;
    const idle = h * (p - h) * heldUp(n.hosts, message);
    const together = p * (p - 1) * message / n.together;
    const seconds = Math.max(
      C.FRAMING * (out + idle) / n.rate,
      n.racks > 1 ? C.FRAMING * up / (C.CROWDED_UPLINK * n.uplink) : 0,
      (h - 1) * message / n.inside,
      together);
    const software = n.start + (p - 1) * n.peer, trips = tripOf(n);
    let waits = software + trips;
    if (cold && n.hosts > 1) waits += slowStart(message, n.rate / (h * (p - h)), trips);
    return {
      seconds: waits + seconds, sent: (p - 1) * message, egress: out / h,
      work: software + together, rounds: 1, waits, trips,
    };
  }

  function ring(n, hops, chunk, cold) {
    const p = ranksOf(n);
    if (p === 1) return nothing;
    const together = p * chunk / n.together;
    const seconds = Math.max(
      n.hosts > 1 ? C.FRAMING * chunk / (C.RINGS * n.rate) : 0,
      n.racks > 1 ? C.FRAMING * chunk / (C.RINGS * n.uplink) : 0,
      n.ranks_per_host > 1 ? chunk / n.inside : 0,
      together);
    const software = n.start + n.peer, trip = tripOf(n);
    const half = p === 2 ? seconds : seconds / 2;
    let waits = hops * Math.max(0, software + trip + half - seconds);
    const trips = Math.min(waits, hops * trip);
    if (cold && n.hosts > 1) waits += slowStart(hops * chunk, n.rate, trip);
    return {
      seconds: waits + hops * seconds, sent: hops * chunk,
      egress: n.hosts > 1 ? hops * chunk / n.ranks_per_host : 0,
      work: hops * together, rounds: hops, waits, trips,
    };
  }

  function treeSum(n, message) {
    const levels = Math.ceil(Math.log2(n.hosts));
    const sent = 2 * (n.hosts - 1) / n.hosts * message;
    const slowest = Math.min(n.rate, n.racks > 1 ? n.uplink : Infinity);
    const trips = levels * tripOf(n), waits = 2 * levels * n.start + trips;
    return {
      seconds: waits + C.FRAMING * sent / slowest, sent, egress: sent / n.ranks_per_host,
      work: 2 * levels * n.start, rounds: 2 * levels, waits, trips,
    };
  }

  const meeting = (n, along, cold) => direct(
    { ...n, start: n.start + n.meeting }, recordBytes(ranksOf(n)) + (along || 0), cold);

  function plain(n, message, cold) {
    if (n.trees && n.hosts > 1) return treeSum(n, message);
    const p = ranksOf(n);
    return ring(n, 2 * (p - 1), message / p, cold);
  }
  function summable(n, message, cold) {
    if ((ranksOf(n) - 1) * message <= C.MOST_SUMMED) return meeting(n, message, cold);
    return then(meeting(n), plain(n, message, cold));
  }
  function gather(n, message, cold) {
    const p = ranksOf(n);
    if (message <= roomOf(p)) return meeting(n, message, cold);
    return then(meeting(n), allGather(n, message, cold));
  }
  function allGather(n, message, cold) {
    const p = ranksOf(n);
    if (p === 2) return direct(n, aligned(message), cold);
    return ring(n, p - 1, aligned(message), cold);
  }
  function swap(n, message, cold) {
    const p = ranksOf(n), shard = message / p;
    if (shard <= roomOf(p)) return meeting(n, shard, cold);
    return then(meeting(n), direct(n, aligned(shard), cold));
  }
  const twoshot = (n, message, cold) =>
    then(swap(n, message, cold), gather(n, message / ranksOf(n)));
  const sparse = (n, message, cold) => then(
    message <= roomOf(ranksOf(n)) ? nothing : meeting(n), twoshot(n, message, cold));
  const joint = (n, message, cold, first) =>
    then(summable(n, first * message, cold), summable(n, (1 - first) * message));
  function streamed(collective, n, message, slices, cold) {
    const piece = message / slices, shard = piece / ranksOf(n);
    const one = collective === "gather" ? allGather(n, piece, cold)
      : then(direct(n, aligned(shard), cold), allGather(n, shard));
    return then(meeting(n), inSlices(one, slices));
  }
  const COLLECTIVES = { plain, summable, gather, twoshot, sparse };

  function hierarchical(n, message, inner, flat, cold, slices) {
    const s = n.ranks_per_host;
    const own = { ...n, hosts: 1, delay: 0, uplink_delay: 0, racks: 1, together: Infinity };
    const inside = s > 1 ? direct(own, inner / s) : nothing;
    const share = { ...n, ranks_per_host: 1, rate: n.rate / s, uplink: n.uplink / s, inside: Infinity };
    const between = slices > 1 ? streamed(flat, share, message / s, slices, cold)
      : COLLECTIVES[flat](share, message / s, cold);
    const meetings = then(then(meeting(n), meeting(n)), meeting(n));
    return then(then(then(meetings, inside), between), inside);
  }

  function collectiveOf(coding, message, p) {
    if (["plain", "summable", "joint"].includes(coding.kind)) return coding.kind;
    const gathered = message * (p - 1), other = message * (p - 1) * (2 / p);
    if (other > C.TWICE * gathered || gathered - other < C.SMALL) return "gather";
    return coding.kind === "elements" ? "sparse" : "twoshot";
  }

  function codecSeconds(c, collective, n, p) {
    if (collective === "plain") return [0, 0, 0];
    const encode = c.call + c.encode * n, decode = c.call + c.decode * n;
    if (collective === "summable" || collective === "joint") return [encode, 0, decode];
    if (collective === "gather") return [encode, 0, decode + (p - 1) * (c.call + c.add * n)];
    const shard = n / p;
    const between = (p - 1) * (c.call + c.add * shard) + c.call + c.encode * shard;
    return [collective === "sparse" ? encode : encode * (p - 1) / p, between, decode];
  }

  function slicesOf(coding, collective, numel, p) {
    if (!coding.cut || !["gather", "twoshot"].includes(collective)) return 1;
    const least = Math.max(C.LEAST_BYTES, p * C.LEAST_SHARE);
    const messages = Math.floor(coding.frame * numel / C.LEAST_MESSAGE);
    return Math.max(1, Math.min(C.MOST, Math.floor(4 * numel / least), messages));
  }

  function exchangeCost(coding, numel, n, nodes, cold) {
    const p = ranksOf(n), s = n.ranks_per_host, message = coding.frame * numel;
    if (p === 1) {
      return {
        encode: 0, moving: 0, network: 0, decode: 0, sent: 0, egress: 0, work: 0, rounds: 0,
        codec: 0, trips: 0,
      };
    }
    let members = p, own = numel, adding = 0, collective, found, slices;
    if (nodes && s > 1 && n.hosts > 1 && coding.kind !== "plain" && coding.kind !== "joint") {
      members = n.hosts;
      own = numel / s;
      collective = collectiveOf(coding, message / s, members);
      slices = slicesOf(coding, collective, own, members);
      found = hierarchical(n, message, 4 * numel, collective, cold, slices);
      adding = numel / n.inside * 4 * 2 * (s - 1) / s;
    } else {
      collective = collectiveOf(coding, message, members);
      slices = slicesOf(coding, collective, own, members);
      if (slices > 1) found = streamed(collective, n, message, slices, cold);
      else if (collective === "joint") found = joint(n, message, cold, coding.first);
      else found = COLLECTIVES[collective](n, message, cold);
    }
    const [encode, between, decode] = codecSeconds(coding, collective, own, members);
    const first = encode / slices, last = between / slices;
    const beside = found.waits + (encode - first) + between;
    const moving = Math.max(found.seconds + last, slices > 1 ? beside : 0) + adding;
    const codec = coding.exchange + encode + between + adding;
    return {
      encode: coding.exchange + first, moving, network: found.seconds, decode, sent: found.sent,
      egress: found.egress, work: codec + decode + found.work, rounds: found.rounds, codec,
      trips: found.trips,
    };
  }

  /* Exchanges of one channel, AT_ONCE under way: ChannelSchedule in Python. */
  function line(trip) {
    let prepared = 0, moved = 0, link = 0;
    const begun = [-Infinity], ended = Array(C.AT_ONCE).fill(0);  // of the last few
    return (arrived, cost) => {
      prepared = Math.max(arrived, prepared, ended[0]) + cost.encode;
      const released = begun.find(each => arrived <= each) ?? Infinity;
      const began = Math.max(prepared, begun.at(-1), Math.min(released + trip, moved));
      link = Math.max(link, began) + cost.moving - cost.trips;
      const own = Math.max(link, began + cost.moving);
      const end = Math.max(own, ended.at(-1)) + cost.decode;
      moved = Math.max(moved, own);
      begun.push(began);
      if (begun.length > C.AT_ONCE) begun.shift();
      ended.push(end);
      ended.shift();
      return end;
    };
  }

  const hiddenOf = (talking, waiting) => talking - waiting > C.ROUNDING ? talking - waiting : 0;

  function overlappedStep(exchanges, n, compute, busy, nodes) {
    const add = line(tripOf(n));
    let ended = 0, late = 0, work = 0, before = 0, link = 0, last = 0;
    let encode = 0, moving = 0, decode = 0, sent = 0, egress = 0;
    const known = new Map();
    exchanges.forEach(([coding, numel, ready], number) => {
      const cold = number === 0 && compute > C.IDLE;
      const key = `${coding.kind} ${coding.frame} ${numel} ${cold}`;  // most buckets are alike
      if (!known.has(key)) known.set(key, exchangeCost(coding, numel, n, nodes, cold));
      const cost = known.get(key);
      const arrived = ready * compute + late;
      if (coding.kind === "plain") {
        const began = Math.max(arrived, before);
        before = ended;
        link = Math.max(link, began) + cost.moving - cost.trips;
        ended = Math.max(link, began + cost.moving);
        last = Math.max(last, ended);
      } else {
        last = Math.max(last, add(arrived, cost));
      }
      late += busy * cost.encode;
      work += cost.work;
      encode += cost.codec;
      moving += cost.network;
      decode += cost.decode;
      sent += cost.sent;
      egress += cost.egress;
    });
    const seconds = Math.max(compute + busy * work, last);
    const hidden = hiddenOf(encode + moving + decode, seconds - compute);
    return { compute, encode, network: moving, decode, hidden, seconds, sent, egress };
  }

  function localStep(exchanges, n, compute, every, fragments, overlap, nodes) {
    const add = line(tripOf(n));
    let encode = 0, moving = 0, decode = 0, sent = 0, egress = 0, ended = 0;
    for (const [coding, numel] of exchanges) {
      const cost = exchangeCost(coding, numel, n, nodes, compute > C.IDLE);
      ended = add(0, cost);
      encode += cost.codec;
      moving += cost.network;
      decode += cost.decode;
      sent += cost.sent;
      egress += cost.egress;
    }
    const waiting = Math.max(0, ended - overlap * compute), share = fragments / every;
    return {
      compute, encode: share * encode, network: share * moving, decode: share * decode,
      hidden: share * hiddenOf(encode + moving + decode, waiting), seconds: compute + share * waiting,
      sent: share * sent, egress: share * egress,
    };
  }

  // Sizes: a transformer of so many parameters.
  const widthOf = parameters => (C.WIDTH_PER_LAYER * parameters / C.MATRICES) ** (1 / 3);
  const vectorShare = parameters => C.VECTORS / (C.MATRICES * widthOf(parameters) + C.VECTORS);

  function lowRank(parameters, rank) {
    const d = widthOf(parameters), vectors = vectorShare(parameters), sides = C.ROWS + C.COLUMNS;
    const share = Math.min(1, rank * sides / (C.MATRICES * d));
    const first = vectors + (1 - vectors) * share * C.ROWS / sides;
    const second = (1 - vectors) * share * C.COLUMNS / sides;
    return [C.WIDTH * (first + second), first / (first + second)];
  }

  function buckets(parameters) {
    const found = [];
    let done = 0;
    while (done < parameters) {
      const room = (found.length ? C.BUCKET : C.FIRST_BUCKET) / C.WIDTH;
      const numel = Math.min(room, parameters - done);
      done += numel;
      found.push([numel, C.FORWARD + (1 - C.FORWARD) * done / parameters]);
    }
    return found;
  }

  function exchangesOf(parameters, coding, uncompressed) {
    if (coding.kind === "joint") return [[coding, parameters, 1]];
    const all = buckets(parameters);
    if (coding.kind === "plain") return all.map(([numel, ready]) => [coding, numel, ready]);
    const vectors = vectorShare(parameters), due = [];
    let pending = 0;
    all.forEach(([numel, ready], number) => {
      due.push([coding, (1 - vectors) * numel, ready]);
      pending += vectors * numel;
      if (C.WIDTH * pending >= C.DENSE_ENOUGH || number === all.length - 1) {
        due.push([uncompressed, pending, ready]);
        pending = 0;
      }
    });
    return due;
  }

  function codingOf(method, parameters) {
    if (!method.rank) return method.coding;
    const [frame, first] = lowRank(parameters, method.rank);
    return { ...method.coding, frame, first };
  }

  /* A step with a method; a setting has network, parameters, compute, busy, nodes. */
  function stepOf(method, setting, uncompressed) {
    const { network, parameters, compute, busy, nodes } = setting;
    const coding = codingOf(method, parameters);
    if (!method.every) {
      const due = exchangesOf(parameters, coding, uncompressed);
      return overlappedStep(due, network, compute, busy, nodes && !method.plain);
    }
    const numel = parameters / method.fragments, vectors = vectorShare(parameters);
    const due = coding.kind === "joint" ? [[coding, numel]]
      : [[uncompressed, vectors * numel], [coding, (1 - vectors) * numel]];
    return localStep(due, network, compute, method.every, method.fragments, method.overlap, nodes);
  }

  function at(setting, rate) {
    const uplink = setting.network.uplink * rate / setting.network.rate;
    return { ...setting, network: { ...setting.network, rate, uplink } };
  }

  /* Bits per second from which on plain PyTorch is as fast. */
  function breakEven(method, plainMethod, setting, uncompressed) {
    const pays = bits => {
      const there = at(setting, bits / 8);
      return stepOf(method, there, uncompressed).seconds
        < stepOf(plainMethod, there, uncompressed).seconds;
    };
    const here = 8 * setting.network.rate;
    let low, high;
    if (pays(here)) {
      if (pays(C.FASTEST)) return Infinity;
      [low, high] = [Math.log2(here), Math.log2(C.FASTEST)];
    } else {
      if (!pays(C.SLOWEST)) return 0;
      [low, high] = [Math.log2(C.SLOWEST), Math.log2(here)];
    }
    for (let i = 0; i < C.HALVINGS; i++) {
      const middle = (low + high) / 2;
      if (pays(2 ** middle)) low = middle; else high = middle;
    }
    return 2 ** low;
  }

  return { stepOf, breakEven, at };
}
