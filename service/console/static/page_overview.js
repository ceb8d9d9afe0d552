// The cluster's rates, its brokers, and the cost of its requests: by purpose and by kind.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { Badge, Card, Dialog, Field, Loaded, Stat, Table, usePoll } from "./parts.js";
import { Plot } from "./plot.js";
import { bytes, count, counted, dollars, duration, ms, rate, short } from "./format.js";

const POLL_MS = 5000;
const HEALTH_MS = 30000;
const DAY_S = 86400;
const MONTH_S = 2628000;
/** S3 Standard's list prices in dollars per thousand requests; deletes are free. */
const PRICES = { put: 0.005, list: 0.005, get: 0.0004 };
const HELD = "tidelog.prices";

function heldPrices() {
  try {
    return { ...PRICES, ...JSON.parse(localStorage.getItem(HELD) || "{}") };
  } catch {
    return PRICES;
  }
}

/** Compute dollars per day at these rates. */
function cost(rates, prices) {
  const of = (perSecond, price) => (perSecond || 0) * DAY_S * price / 1000;
  const parts = { put: of(rates.puts, prices.put), list: of(rates.lists, prices.list), get: of(rates.gets, prices.get) };
  return { ...parts, total: parts.put + parts.list + parts.get };
}

/** Compute the mean of the last half hour, or of the time since the start. */
function means(history) {
  const mean = (values) => {
    const known = values.filter((one) => one != null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  return Object.fromEntries(["puts", "gets", "lists"].map((name) => [name, mean(history.series[name])]));
}

export function Overview() {
  const state = usePoll((signal) => get("tidelog/v1/overview", { history: true }, signal), POLL_MS);
  const health = usePoll((signal) => get("tidelog/v1/health", {}, signal), HEALTH_MS).data;
  return html`<header class="page-head"><h1>Overview</h1>
      ${state.data && html`<p class="muted"><code>${state.data.store}</code> · cluster <code>${state.data.cluster_id}</code></p>`}
    </header>
    <${Health} health=${health} />
    <${Loaded} state=${state} rows=${10}>${(seen) => html`<${Seen} seen=${seen} health=${health} />`}<//>`;
}

/** Fold problems by their kind: the worst kind first. */
function byKind(problems) {
  const kinds = new Map();
  for (const one of problems) {
    const key = `${one.name} ${one.runbook}`;
    kinds.set(key, [...(kinds.get(key) || []), one]);
  }
  return [...kinds.values()];
}

/** Whether the cluster is well. Nothing, if the caller may not know it. */
function Health({ health }) {
  if (!health) return null;
  const { problems } = health;
  if (!problems.length) return html`<p class="muted"><${Badge} kind="good">well<//> The broker knows of no problem.</p>`;
  return html`<${Card} title="Not well" note=${counted(problems.length, "problem")} flush>
    <div class="scroll"><table aria-label="Problems">
      <thead><tr><th>Kind</th><th class="right">Count</th><th>What</th><th class="low">Runbook</th></tr></thead>
      <tbody>${byKind(problems).map((kind) => html`<tr key=${kind[0].name + kind[0].runbook}>
        <td><${Badge} kind="warn">${kind[0].name}<//></td><td class="right">${count(kind.length)}</td>
        <td class="wraps">${kind[0].what}${kind.length > 1 && html` <span class="muted">and ${count(kind.length - 1)} more</span>`}</td>
        <td class="low wraps"><code>${kind[0].runbook}</code></td></tr>`)}</tbody>
    </table></div><//>`;
}

function Seen({ seen, health }) {
  const [prices, setPrices] = useState(heldPrices);
  const now = seen.rates;
  const half = means(seen.history);
  const mean = half.puts == null ? now : half;
  const day = cost(mean, prices);
  const doubts = Object.entries(seen.tables_in_doubt);
  const damaged = Object.entries(seen.damaged_tails);
  return html`
    ${doubts.map(([topic, why]) => html`<p class="warn-text" key=${topic}><strong>Table of ${topic} in doubt</strong>: ${why}</p>`)}
    ${damaged.map(([partition, why]) => html`<p class="warn-text" key=${partition}><strong>Tail of ${partition} damaged</strong>: ${why}</p>`)}
    <div class="stats">
      <${Stat} name="Records in" value=${rate(now.records_in)} unit="/s" note=${`${bytes(now.bytes_in)}/s`} />
      <${Stat} name="Records out" value=${rate(now.records_out)} unit="/s" note=${`${bytes(now.bytes_out)}/s`} />
      <${Stat} name="Ack latency" value=${ms(now.ack_p50_ms)} note=${`p99 ${ms(now.ack_p99_ms)}`} title="From a produce request to its answer, with acks=all: mostly the store's PUT" />
      <${Stat} name="Commits" value=${rate(now.commits)} unit="/s" note=${`WAL at ${count(seen.wal_seq)}`} title="Entries of the WAL, one conditional PUT each" />
      <${Stat} name="Unsealed" value=${bytes(seen.unsealed_bytes)} note=${seen.unsealed_since_ms ? `oldest ${duration(seen.now_ms - seen.unsealed_since_ms)}` : "all in tables"} title="Committed records that are not in their topic's table yet" />
      <${Stat} name="Cost per day" value=${dollars(day.total)} note=${`${dollars(day.total * MONTH_S / DAY_S)} a month`} title="Requests to the store, at the mean rate of the last half hour and the prices below" />
    </div>
    <${Plots} history=${seen.history} />
    <${Brokers} seen=${seen} />
    ${health && html`<${Purposes} costs=${health.store.costs} prices=${prices} />`}
    <${Costs} rates=${mean} prices=${prices} setPrices=${setPrices} day=${day} />`;
}

function Plots({ history }) {
  const { at_ms: at, series } = history;
  const line = (name, key, colour) => ({ name, values: series[key], colour });
  const plots = useMemo(() => [
    ["Records per second", [line("in", "records_in", "--line-1"), line("out", "records_out", "--line-2")], rate],
    ["Ack latency, ms", [line("p50", "ack_p50_ms", "--line-1"), line("p99", "ack_p99_ms", "--line-3")], rate],
    ["Store requests per second", [line("PUT", "puts", "--line-1"), line("GET", "gets", "--line-2"), line("LIST", "lists", "--line-3")], rate],
    ["Bytes per second", [line("in", "bytes_in", "--line-1"), line("out", "bytes_out", "--line-2")], bytes],
  ], [at.length, at[at.length - 1]]);
  return html`<div class="grid">${plots.map(([title, lines, show]) => html`
    <${Card} key=${title} title=${title} note="last 30 min">
      ${at.length > 1 ? html`<${Plot} label=${title} atMs=${at} series=${lines} show=${show} binary=${show === bytes} />`
        : html`<p class="muted plot-wait">The first values appear within ten seconds of a broker's start.</p>`}
    <//>`)}</div>`;
}

function Brokers({ seen }) {
  const r = (broker, name) => broker.rates?.[name];
  const columns = [
    { name: "Broker", of: (b) => b.name, show: (b) => html`<span class="badged broker"><span class="name">${b.name}</span>
        ${b.is_sequencer && html`<${Badge} kind="accent">sequencer<//>`}${b.is_me && html`<${Badge}>connected<//>`}
        ${b.worker > 0 && html`<${Badge}>worker ${b.worker}<//>`}</span>` },
    { name: "Address", low: true, show: (b) => html`<code>${b.address.replace("http://", "") || "none"}</code>` },
    { name: "Up", low: true, right: true, of: (b) => -b.started_ms, show: (b) => duration(seen.now_ms - b.started_ms) },
    { name: "In /s", right: true, of: (b) => r(b, "records_in"), show: (b) => (b.rates ? rate(r(b, "records_in")) : html`<span class="bad">no response</span>`) },
    { name: "Out /s", right: true, of: (b) => r(b, "records_out"), show: (b) => rate(r(b, "records_out")) },
    { name: "Requests /s", right: true, low: true, of: (b) => r(b, "requests"), show: (b) => rate(r(b, "requests")) },
    { name: "Commits /s", right: true, low: true, of: (b) => r(b, "commits"), show: (b) => rate(r(b, "commits")) },
    { name: "Ack p50", right: true, of: (b) => r(b, "ack_p50_ms"), show: (b) => ms(r(b, "ack_p50_ms")) },
    { name: "Ack p99", right: true, low: true, of: (b) => r(b, "ack_p99_ms"), show: (b) => ms(r(b, "ack_p99_ms")) },
    { name: "WAL", right: true, low: true, of: (b) => b.wal_seq, show: (b) => (b.rates ? count(b.wal_seq) : "–") },
    { name: "Buffer", right: true, low: true, of: (b) => b.buffered_bytes, show: (b) => (b.rates ? bytes(b.buffered_bytes) : "–") },
  ];
  const gone = seen.gone.length ? [`${seen.gone.length} gone`] : [];
  const note = [`${seen.brokers.length} live`, ...gone, counted(seen.topics, "topic"), counted(seen.partitions, "partition"), counted(seen.groups, "group")].join(" · ");
  return html`<${Card} title="Brokers" note=${note} flush>
    <${Table} label="Brokers" columns=${columns} rows=${seen.brokers} id=${(b) => b.number} sorted=${{ by: -1, down: false }} />
    ${seen.gone.map((one) => html`<p class="gone" key=${one.name}><${Badge} kind="warn">gone<//> <span class="name">${one.name}</span>${" "}
      <span class="muted">${one.address.replace("http://", "")} · last answer ${duration(seen.now_ms - one.since_ms)} ago; the plots have its past</span></p>`)}
  <//>`;
}

/** What the requests are for, at the prices of this browser: the dearest purpose first. */
function Purposes({ costs, prices }) {
  const month = (paces) => Object.entries(paces).reduce((sum, [verb, pace]) => sum + pace * MONTH_S / 60 * (prices[verb] || 0) / 1000, 0);
  const rows = costs.map((one) => ({
    ...one,
    pace: Object.values(one.requests_a_minute).reduce((a, b) => a + b, 0),
    month: month(one.requests_a_minute),
  })).sort((a, b) => b.month - a.month);
  const total = rows.reduce((all, row) => all + row.month, 0);
  const [dearest] = rows;
  const verbs = ["put", "list", "get"];
  const sum = (verb) => rows.reduce((all, row) => all + (row.requests_a_minute[verb] || 0), 0);
  const share = (row) => (total ? Math.round(100 * row.month / total) : 0);
  return html`<${Card} title="Cost by purpose" note="mean of the last 30 min" flush>
    <p class="card-lead">${dearest ? html`Most of it: <strong>${dearest.purpose}</strong>, ${share(dearest)} %.${" "}
      ${dearest.setting ? html`<code>${dearest.setting}</code> lowers it.` : "No setting lowers it."}` : "No request cost anything."}</p>
    <div class="scroll"><table aria-label="Cost by purpose">
      <thead><tr><th scope="col">Purpose</th>
        ${verbs.map((verb) => html`<th key=${verb} scope="col" class="right low">${verb.toUpperCase()} per minute</th>`)}
        <th scope="col" class="right">Requests per minute</th><th scope="col" class="right">$ per month</th>
        <th scope="col" class="low">Lowered by</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.purpose}><th scope="row" class="wraps">${row.purpose}</th>
        ${verbs.map((verb) => html`<td key=${verb} class="right low">${rate(row.requests_a_minute[verb] || 0)}</td>`)}
        <td class="right">${rate(row.pace)}</td>
        <td class="right"><span class="lag"><span class="lag-bar" aria-hidden="true"><span style=${{ width: `${share(row)}%` }}></span></span>${dollars(row.month)}</span></td>
        <td class="low">${row.setting ? html`<code>${row.setting}</code>` : html`<span class="muted">none</span>`}</td></tr>`)}</tbody>
      <tfoot><tr><td>All brokers</td>
        ${verbs.map((verb) => html`<td key=${verb} class="right low">${rate(sum(verb))}</td>`)}
        <td class="right">${rate(rows.reduce((all, row) => all + row.pace, 0))}</td>
        <td class="right"><strong>${dollars(total)}</strong></td><td class="low"></td></tr></tfoot>
    </table></div>
  <//>`;
}

function Costs({ rates, prices, setPrices, day }) {
  const [edits, setEdits] = useState(false);
  const rows = [["put", "PUT", rates.puts], ["list", "LIST", rates.lists], ["get", "GET", rates.gets]];
  const actions = html`<button type="button" onClick=${() => setEdits(true)}>Edit prices</button>`;
  return html`<${Card} title="Cost of requests" note="mean of the last 30 min" actions=${actions} flush>
    <div class="scroll"><table aria-label="Cost of requests">
      <thead><tr><th>Request</th><th class="right">per second</th><th class="right low">per day</th><th class="right">$ per 1,000</th><th class="right">$ per day</th></tr></thead>
      <tbody>${rows.map(([key, name, perSecond]) => html`<tr key=${key}><td>${name}</td>
        <td class="right">${rate(perSecond)}</td><td class="right low">${short((perSecond || 0) * DAY_S)}</td>
        <td class="right">${prices[key]}</td><td class="right">${dollars(day[key])}</td></tr>`)}</tbody>
      <tfoot><tr><td colspan="3">Included: the requests of Delta's client, by what it reads and writes. Not included: storage and traffic</td>
        <td class="low"></td><td class="right"><strong>${dollars(day.total)}</strong></td></tr></tfoot>
    </table></div>
    ${edits && html`<${Prices} prices=${prices} onClose=${() => setEdits(false)} onSave=${(saved) => { setPrices(saved); setEdits(false); }} />`}
  <//>`;
}

function Prices({ prices, onClose, onSave }) {
  const [typed, setTyped] = useState(prices);
  useEffect(() => setTyped(prices), [prices]);
  const save = () => {
    const saved = Object.fromEntries(Object.entries(typed).map(([key, value]) => [key, Math.max(Number(value) || 0, 0)]));
    localStorage.setItem(HELD, JSON.stringify(saved));
    onSave(saved);
  };
  return html`<${Dialog} title="Prices of requests" onClose=${onClose} onSubmit=${save}>
    <p class="muted">Dollars per thousand requests, stored in this browser. The defaults are S3 Standard in us-east-1.</p>
    ${["put", "list", "get"].map((key, at) => html`<${Field} key=${key} label=${key.toUpperCase()}>
      <input type="number" min="0" step="any" data-first=${at === 0 || undefined} value=${typed[key]} onInput=${(e) => setTyped({ ...typed, [key]: e.target.value })} />
    <//>`)}
    <button type="button" onClick=${() => setTyped(PRICES)}>Prices of S3 Standard</button>
  <//>`;
}
