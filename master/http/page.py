"""The page of the HTTP edge: one self-contained document that draws `/api/job`.

Everything that comes from the job is set as text, never as markup. If the master has a token, put it behind the `#` of
the address (`http://…/#TOKEN`), which browsers do not send.
"""

from __future__ import annotations

__all__ = ("PAGE", "PAGE_POLICY")

PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Dal Segno</title>
<style>
  :root { color-scheme: light dark; --line: #8886; --mark: #3b76c4; --bad: #c4453b; }
  body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 62rem; padding: 0 1rem; }
  h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
  #reason { min-height: 1.5em; opacity: .8; }
  dl { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; margin: 1rem 0; }
  dt { font-size: .8rem; opacity: .7; } dd { margin: 0; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
  table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
  th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid var(--line); }
  th { font-size: .8rem; opacity: .7; font-weight: normal; }
  svg { width: 100%; border: 1px solid var(--line); } polyline { fill: none; stroke: var(--mark); }
  rect { fill: var(--mark); opacity: .25; } rect.lost { fill: var(--bad); opacity: .6; }
  text { font-size: 11px; fill: currentColor; }
</style>
<h1 id="title">Dal Segno</h1>
<div id="reason"></div>
<dl id="numbers"></dl>
<h2>World</h2><table id="nodes"></table>
<h2>Epochs by step (red: steps done again)</h2><svg id="timeline" viewBox="0 0 1000 56"></svg>
<table id="history"></table>
<h2>Loss, as this master saw it</h2><svg id="loss" viewBox="0 0 1000 220"></svg>
<script>
"use strict";
const byId = (id) => document.getElementById(id);
const svg = (name, attributes, text) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
};
const html = (name, text) => { const e = document.createElement(name); e.textContent = text; return e; };
const number = (value, digits) => value === null || value === undefined ? "-" : Number(value).toFixed(digits);
const lost = (steps, more) => more ? "at least " + steps : steps;
const table = (id, head, rows) => byId(id).replaceChildren(...[head, ...rows].map((row, index) => {
  const line = document.createElement("tr");
  line.append(...row.map((cell) => html(index ? "td" : "th", cell)));
  return line;
}));
function numbers(job) {
  const entries = {
    phase: job.phase.replace("PHASE_", "").toLowerCase(), epoch: job.epoch,
    step: job.unheard && !Number(job.step) ? "-" : job.step,
    committed: job.head ? job.head.step : "-", loss: number(job.loss, 4),
    goodput: job.goodput === null ? "-" : number(100 * job.goodput, 1) + " %",
    paused: number(job.history.reduce((sum, e) => sum + e.paused, 0), 1) + " s",
    "lost steps": lost(job.history.reduce((sum, e) => sum + Number(e.lost_steps), 0),
      job.history.some((e) => e.lost_more && !e.unheard)),
  };
  byId("numbers").replaceChildren(...Object.entries(entries).map(([name, value]) => {
    const group = document.createElement("div");
    group.append(html("dt", name), html("dd", value));
    return group;
  }));
}
function timeline(job) {
  const last = Math.max(1, Number(job.step), ...job.history.map((e) => Number(e.last_step)));
  const shapes = [];
  job.history.forEach((e, index) => {
    const next = job.history[index + 1];
    const from = Number(e.resumed_step), to = Math.max(from, next ? Number(e.last_step) : Number(job.step));
    const x = 1000 * from / last, width = Math.max(2, 1000 * (to - from) / last - 1);
    shapes.push(svg("rect", {x, width, y: 46 - 10 * Math.min(4, e.nodes), height: 10 * Math.min(4, e.nodes)}));
    if (Number(e.lost_steps)) {
      const lost = 1000 * Number(e.lost_steps) / last;
      shapes.push(svg("rect", {class: "lost", x, width: Math.max(2, lost), y: 48, height: 6}));
    }
    shapes.push(svg("text", {x: x + 3, y: 44}, e.nodes));
  });
  byId("timeline").replaceChildren(...shapes);
}
function loss(job) {
  const points = job.curve.filter((point) => point[1] !== null);
  if (points.length < 2) return;
  const steps = points.map((point) => point[0]), values = points.map((point) => point[1]);
  const low = Math.min(...values), high = Math.max(...values), first = steps[0], last = steps.at(-1);
  const place = ([step, value]) =>
    [1000 * (step - first) / Math.max(1, last - first), 210 - 200 * (value - low) / (high - low || 1)].join(",");
  byId("loss").replaceChildren(
    svg("polyline", {points: points.map(place).join(" "), "vector-effect": "non-scaling-stroke"}),
    svg("text", {x: 4, y: 14}, high.toPrecision(5)), svg("text", {x: 4, y: 206}, low.toPrecision(5)),
    svg("text", {x: 920, y: 216}, "step " + last));
}
function draw(job) {
  byId("title").textContent = "Dal Segno: job " + job.job_id + ", " + job.run_id;
  byId("reason").textContent = job.reason;
  numbers(job);
  table("nodes", ["node", "role", "rank", "host", "workers", ""], job.nodes.map((node) =>
    [node.node, node.role, node.role === "member" ? node.group_rank : "", node.host, node.nproc, node.reason]));
  timeline(job);
  table("history", ["epoch", "why", "nodes", "workers", "resumed at step", "paused", "lost steps"],
    job.history.map((e) => [e.epoch, e.cause, e.nodes, e.world_size, e.resumed_step,
      e.unheard ? "-" : number(e.paused, 1) + " s", e.unheard ? "-" : lost(e.lost_steps, e.lost_more)]).reverse());
  loss(job);
}
async function refresh() {
  const token = location.hash.slice(1);
  const headers = token ? {authorization: "Bearer " + token} : {};
  try {
    const answer = await fetch("api/job", {headers, signal: AbortSignal.timeout(5000)});
    if (answer.status === 401) throw new Error("the master wants its token: open this page with #TOKEN at the end");
    if (!answer.ok) throw new Error("the master answers " + answer.status);
    draw(await answer.json());
  } catch (error) { byId("reason").textContent = error.message; }
  setTimeout(refresh, 2000);
}
refresh();
</script>
</html>
"""
