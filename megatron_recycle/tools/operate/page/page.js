"use strict";
// Asks for the job's state once a second and draws what has changed. All text of the job's goes in as text, never as HTML.

const OFTEN = 1000, SELDOM = 5000, MANY = 48, MOST_SEEN = 120;
const SHORT = {up: "", slow: "slow", leaving: "leaves", exit: "✕", frozen: "❄", stalled: "!", unreachable: "?",
               corrupt: "≠", leave: "left", move: "moved", stranded: "idle"};
const KINDS = {F: "forward", B: "input gradient", W: "weight gradient", FB: "both gradients", S: "reduce and step"};
const BAD = new Set(["suspected", "explained", "last_copy", "last_host", "save_failed", "join_failed", "unreadable"]);
const $ = (id) => document.getElementById(id);
let chosen = null, drawn = "", pipeline = null, lastEvent = 0, lastAnswer = 0, cells = new Map(), grid = "", lies = false;

function make(tag, attributes = {}, text = null) {
  const svg = ["svg", "line", "rect", "path", "text", "title", "g"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== null) made.textContent = text;
  return made;
}
function say(id, text) { if ($(id).textContent !== text) $(id).textContent = text; }
const clock = (t) => new Date(1000 * t).toLocaleTimeString([], {hour12: false});
function span(s) {
  if (s < 10) return `${Math.max(0, s).toFixed(1)} s`;
  if (s < 120) return `${Math.round(s)} s`;
  return s < 7200 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`;
}

function showFacts(now) {
  document.body.className = `level${now.exit_status}`;
  const word = now.verdict.replaceAll("_", " ").toUpperCase();
  say("run", now.run.split("/").pop());
  say("word", word);
  say("line", now.line);
  document.title = `${word}: ${now.run.split("/").pop()}`;
  const speed = now.throughput, cost = now.cost, rows = [];
  if (now.next_end) rows.push(["next", now.next_end]);
  if (now.repair) rows.push(["repair", now.repair, true]);
  for (const command of now.drain) rows.push(["drain", command, true]);
  if (speed.iteration_s) {
    let text = `an iteration takes ${speed.iteration_s.toFixed(3)} s`;
    if (speed.fault_free_s) text += `; fault-free ${speed.fault_free_s.toFixed(3)} s`;
    if (speed.against_fault_free) text += ` (${speed.against_fault_free.toFixed(2)} of its throughput)`;
    if (speed.plan_s) text += `; plan ${speed.plan_s.toFixed(3)} s (${speed.against_plan.toFixed(2)})`;
    rows.push(["speed", text]);
  }
  if (cost.workers_lost) {
    rows.push(["cost", `${cost.workers_lost} workers lost, ${span(cost.stood_still_s)} standing still, ` +
               `${span(cost.slower_s)} by slower iterations`]);
  }
  for (const one of now.out) {
    const why = (one.causes || []).join("; ") || one.why;
    rows.push(["out", `${one.worker} on ${one.host}: ${one.kind}` +
               (one.iteration === null ? "" : ` in iteration ${one.iteration}`) +
               `, since ${clock(one.since)}` + (why ? `: ${why}` : "")]);
  }
  const text = JSON.stringify(rows);
  if ($("facts").dataset.shown === text) return;
  $("facts").dataset.shown = text;
  $("facts").replaceChildren(...rows.flatMap(([name, value, isCommand]) => {
    const told = make("dd");
    told.append(isCommand ? make("code", {}, value) : value);
    return [make("dt", {}, name), told];
  }));
}

function worst(one, other) { return !one || one.state === "up" || one.state === "stranded" ? other : one; }

function showGrid(now) {
  const [pipelines, stages] = now.grid, byPlace = new Map();
  for (const worker of now.workers) {
    const place = worker.worker.split(".")[0];
    byPlace.set(place, worst(byPlace.get(place), worker));
  }
  const size = `${pipelines}x${stages}`;
  if (grid !== size) {
    grid = size;
    cells = new Map();
    const table = $("grid"), head = make("tr"), body = make("tbody"), many = pipelines * stages > MANY;
    lies = many && pipelines > stages;  // screens are wider than high
    const [rows, columns] = lies ? [stages, pipelines] : [pipelines, stages];
    head.append(make("td"), ...Array.from({length: columns}, (_, n) => make("th", {scope: "col"}, `${n}`)));
    for (let down = 0; down < rows; down++) {
      const row = make("tr", {role: "row"});
      row.append(make("th", {scope: "row"}, `${down}`));
      for (let right = 0; right < columns; right++) {
        const place = lies ? `${right}:${down}` : `${down}:${right}`;
        const cell = make("td", {role: "gridcell"}), button = make("button", {type: "button", tabindex: "-1"});
        button.dataset.place = place;
        cell.append(button);
        row.append(cell);
        cells.set(place, button);
      }
      body.append(row);
    }
    say("axes", lies ? "A row for each stage, a column for each pipeline" : "A row for each pipeline, a column for each stage");
    const top = make("thead");
    top.append(head);
    table.replaceChildren(top, body);
    table.className = many ? "many" : "";
    if (cells.size) cells.get("0:0").tabIndex = 0;
  }
  const states = new Map();
  for (const [place, button] of cells) {
    const one = byPlace.get(place) || {state: "?", host: ""}, isLost = !["up", "slow", "leaving", "stranded"].includes(one.state);
    states.set(one.state, (states.get(one.state) || 0) + 1);
    const sign = SHORT[one.state] ?? "?";
    const text = table_many() ? sign || "·" : `${place}${sign ? " " + sign : ""}`;
    const shown = `${text}|${one.host}|${one.state}`;
    if (button.dataset.shown === shown) continue;
    button.dataset.shown = shown;
    button.className = isLost ? "lost" : one.state === "up" ? "" : "odd";
    button.replaceChildren(text, make("small", {}, one.host));
    button.setAttribute("aria-label", `worker ${place}, ${one.state}, on ${one.host || "no host"}`);
    button.title = `${place}: ${one.state}, ${one.host}`;
  }
  say("legend", [...states].map(([state, count]) => `${count} ${state}`).join(", "));
  if (chosen) showWorker(now, chosen);
}
const table_many = () => $("grid").className === "many";

function showWorker(now, place) {
  const parts = now.workers.filter((one) => one.worker.split(".")[0] === place);
  say("worker", parts.map((one) => {
    const out = now.out.find((other) => other.worker === one.worker);
    const done = out ? `${out.kind}, out since ${clock(out.since)}` : one.state;
    return `${one.worker}: ${done}; host ${one.host}${one.gpu ? `, ${one.gpu}` : ""}, rank ${one.rank}, pid ${one.pid}` +
      (one.iteration === null ? "" : `, iteration ${one.iteration}`) + (one.doing ? `, ${one.doing}` : "");
  }).join(" | "));
}

function move(from, down, right) {
  const [d, s] = from.dataset.place.split(":").map(Number);
  const next = cells.get(lies ? `${d + right}:${s + down}` : `${d + down}:${s + right}`);
  if (!next) return;
  from.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
$("grid").addEventListener("keydown", (event) => {
  const ways = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}, way = ways[event.key];
  if (!way || !event.target.dataset.place) return;
  event.preventDefault();
  move(event.target, ...way);
});
$("grid").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  if (chosen && cells.get(chosen)) cells.get(chosen).removeAttribute("aria-pressed");
  chosen = button.dataset.place;
  button.setAttribute("aria-pressed", "true");
  if (latest) showWorker(latest, chosen);
});

function showSpeed(now) {
  const rows = now.iterations.slice(-MOST_SEEN * 5), width = 1000, height = 190, left = 46, bottom = 168;
  if (rows.length < 2) {
    say("speedhint", "Nothing is measured yet.");
    return;
  }
  const first = rows[0][0], kinds = ["suspected", "joined", "restored"];
  const marks = now.marks.filter((one) => one.t >= first && kinds.includes(one.event));
  const last = Math.max(rows[rows.length - 1][0], ...marks.map((one) => one.t)), sorted = rows.map((row) => row[2]).sort((a, b) => a - b);
  const most = 1.15 * Math.max(sorted[Math.floor(0.97 * (sorted.length - 1))], now.throughput.fault_free_s || 0);
  const x = (t) => left + (width - left - 8) * (t - first) / Math.max(1e-9, last - first);
  const y = (s) => bottom - (bottom - 8) * Math.min(s, most) / most;
  const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"});
  for (const share of [0, 0.5, 1]) {
    const at = y(share * most);
    svg.append(make("line", {class: "axis", x1: left, x2: width - 8, y1: at, y2: at}),
               make("text", {x: left - 5, y: at + 4, "text-anchor": "end"}, (share * most).toPrecision(2)));
  }
  const usual = now.throughput.fault_free_s;
  if (usual) {
    svg.append(make("line", {class: "axis usual", x1: left, x2: width - 8, y1: y(usual), y2: y(usual)}));
  }
  for (const one of marks.slice(-60)) {
    const line = make("line", {class: one.event === "suspected" ? "mark" : "mark joined", x1: x(one.t), x2: x(one.t),
                               y1: 6, y2: bottom});
    line.append(make("title", {}, `${clock(one.t)} ${one.text}`));
    svg.append(line);
  }
  svg.append(make("path", {class: "curve", d: rows.map(([t, , s], n) =>
    `${n ? "L" : "M"}${x(t).toFixed(1)} ${y(s).toFixed(1)}`).join("")}));
  if (usual) {
    svg.append(make("text", {class: "over", x: width - 10, y: y(usual) - 5, "text-anchor": "end"}, "fault-free"));
  }
  svg.append(make("text", {x: left, y: height - 6}, clock(first)),
             make("text", {x: width - 8, y: height - 6, "text-anchor": "end"}, clock(last)));
  $("chart").replaceChildren(svg);
  const lost = marks.filter((one) => one.event === "suspected");
  say("speedhint", `Iterations ${rows[0][1]} to ${rows[rows.length - 1][1]}; ` + (lost.length ?
    `failures are red lines: ${lost.slice(-4).map((one) => `${one.text} at ${clock(one.t)}`).join(", ")}.` : "no failure among them."));
  $("table").tBodies[0].replaceChildren(...rows.slice(-12).reverse().map(([t, number, s]) => {
    const row = make("tr");
    row.append(make("td", {}, number), make("td", {}, clock(t)), make("td", {}, s.toFixed(3)));
    return row;
  }));
}

async function showSchedule(now) {
  const wanted = `${now.digest}|${pipeline}`;
  if (!now.digest || drawn === wanted) return;
  drawn = wanted;
  const answer = await fetch(`schedule${pipeline === null ? "" : `?pipeline=${pipeline}`}`), plan = await answer.json();
  if (!plan.rows) {
    say("schedulehint", plan.why || "There is no plan yet.");
    $("plan").replaceChildren();
    return;
  }
  const many = plan.pipeline !== null;
  $("choice").hidden = !many;
  if (many && $("pipeline").options.length !== plan.pipelines) {
    $("pipeline").replaceChildren(...Array.from({length: plan.pipelines}, (_, d) => make("option", {value: d}, `${d}`)));
    $("pipeline").value = plan.pipeline;
  }
  const left = 44, row = 20, width = 1000, height = plan.rows.length * row + 22;
  const x = (t) => left + (width - left - 6) * t / Math.max(1, plan.makespan);
  const svg = make("svg", {viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"});
  plan.rows.forEach((name, n) => svg.append(make("text", {x: left - 5, y: n * row + 14, "text-anchor": "end"}, name)));
  for (const n of plan.failed) {
    svg.append(make("rect", {class: "failed", x: left, y: n * row + 2, width: width - left - 6, height: row - 4}));
  }
  const kinds = new Set();
  let guests = 0;
  for (const [n, kind, start, end, guest, text] of plan.boxes) {
    kinds.add(kind);
    guests += guest;
    const wide = Math.max(1, x(end) - x(start));
    const box = make("rect", {class: guest ? "guest" : "home", x: x(start), y: n * row + 2, width: wide, height: row - 4,
                              fill: `var(--${kind})`});
    box.append(make("title", {}, `${plan.rows[n]}: ${KINDS[kind] || kind} ${text}`));
    svg.append(box);
    if (text && wide > 6.2 * text.length + 2) {
      svg.append(make("text", {class: "box", x: x(start) + wide / 2, y: n * row + 14, "text-anchor": "middle"}, text));
    }
  }
  let at = left;
  for (const kind of Object.keys(KINDS).filter((name) => kinds.has(name))) {
    const y = plan.rows.length * row + 8;
    svg.append(make("rect", {x: at, y, width: 12, height: 12, fill: `var(--${kind})`}),
               make("text", {x: at + 16, y: y + 10}, KINDS[kind]));
    at += 30 + 7 * KINDS[kind].length;
  }
  $("plan").replaceChildren(svg);
  say("schedulehint", `One iteration from a cold start, ${many ? `pipeline ${plan.pipeline}` : `${plan.rows.length} workers`}` +
      `; ${guests} actions for another pipeline (framed)` + (plan.failed.length ? "; grey: failed workers." : "."));
}
$("pipeline").addEventListener("change", (event) => {
  pipeline = Number(event.target.value);
  if (latest) showSchedule(latest);
});

function showEvents(now) {
  const list = $("events"), wanted = $("filter").value.toLowerCase(), fresh = now.events.filter((one) => one.number > lastEvent);
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 30;
  for (const one of fresh) {
    const line = make("li", BAD.has(one.event) ? {class: "bad"} : {});
    line.append(make("time", {datetime: new Date(1000 * one.t).toISOString()}, clock(one.t)), " ",
                make("b", {}, one.event), " ", one.text);
    line.hidden = !line.textContent.toLowerCase().includes(wanted);
    list.append(line);
    lastEvent = one.number;
  }
  while (list.children.length > 400) list.firstChild.remove();
  if (fresh.length && atEnd) list.scrollTop = list.scrollHeight;
}
$("filter").addEventListener("input", () => {
  for (const line of $("events").children) line.hidden = !line.textContent.toLowerCase().includes($("filter").value.toLowerCase());
});

let latest = null;
async function look() {
  try {
    const answer = await fetch("state", {signal: AbortSignal.timeout(5000)});
    if (!answer.ok) throw new Error(`${answer.status}: ${(await answer.text()).trim()}`);
    latest = await answer.json();
    lastAnswer = Date.now();
    $("gone").hidden = true;
    showFacts(latest);
    showGrid(latest);
    showSpeed(latest);
    showEvents(latest);
    await showSchedule(latest);
  } catch (error) {
    drawn = "";
    $("gone").hidden = false;
    say("gone", `No answer from the job's watcher${lastAnswer ? ` since ${new Date(lastAnswer).toLocaleTimeString([], {hour12: false})}` : ""}: ` +
        `what stands here may be old (${error.message}). The job may be over: recycle status says how it ended.`);
  }
  setTimeout(look, document.hidden ? SELDOM : OFTEN);
}
look();
