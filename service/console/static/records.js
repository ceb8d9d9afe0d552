// The record browser: reads a partition by offset, by time or from its end, with a filter; follows
// it live; produces a record.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { fetchRecords, follow, get, part } from "./api.js";
import { Badge, Card, Empty, Field, Guard, Loaded, Problem, usePoll } from "./parts.js";
import { count, decode, time } from "./format.js";
import { Opened } from "./record.js";
import { Produce } from "./produce.js";

const PAGE = 50;
const LIVE_MAX = 500;
const SCAN_BYTES = 1 << 20;
const SCAN_RECORDS = 100_000;

/** Loads the topic's partitions, to show one that has records first. */
export function Records({ name, query }) {
  const state = usePoll((signal) => get(`tidelog/v1/topics/${part(name)}`, {}, signal), 0, [name]);
  return html`<${Loaded} state=${state}>${(topic) => html`<${Browser} topic=${topic} query=${query} />`}<//>`;
}

function firstWithRecords(partitions) {
  const found = partitions.find((one) => one.high_watermark > one.log_start_offset);
  return (found ?? partitions[0]).partition_id;
}

function Browser({ topic, query }) {
  const name = topic.topic_name;
  const asked = query.get("p");
  const [partition, setPartition] = useState(asked === null ? firstWithRecords(topic.partitions) : Number(asked));
  const [from, setFrom] = useState(query.get("from") || "newest");
  const [at, setAt] = useState(query.get("at") || "");
  const [key, setKey] = useState("");
  const [live, setLive] = useState(false);
  const [produces, setProduces] = useState(false);
  const [wanted, setWanted] = useState({ from, at, key: "", go: 0 });
  const look = (changed = {}) => setWanted((was) => ({ from, at, key, go: was.go + 1, ...changed }));
  const submit = (event) => {
    event.preventDefault();
    setLive(false);
    look();
  };
  const pick = (value) => {
    setPartition(Number(value));
    look({ from: from === "offset" ? "newest" : from });
  };
  const partitions = Array.from({ length: topic.partitions_count }, (_, n) => n);
  return html`<${Card}>
    <form class="browse" onSubmit=${submit}>
      <${Field} label="Partition"><select aria-label="Partition" value=${partition} onChange=${(e) => pick(e.target.value)}>
        ${partitions.map((n) => html`<option key=${n} value=${n}>${n}</option>`)}</select><//>
      <${Field} label="From"><select aria-label="From" value=${from} onChange=${(e) => { setFrom(e.target.value); setAt(""); if (["newest", "oldest"].includes(e.target.value)) look({ from: e.target.value, at: "" }); }}>
        <option value="newest">newest</option><option value="oldest">oldest</option>
        <option value="offset">offset</option><option value="time">time</option></select><//>
      ${from === "offset" && html`<${Field} label="Offset"><input type="number" min="0" required value=${at} onInput=${(e) => setAt(e.target.value)} /><//>`}
      ${from === "time" && html`<${Field} label="Time"><input type="datetime-local" step="0.001" required value=${at} onInput=${(e) => setAt(e.target.value)} /><//>`}
      <${Field} label="Key contains"><input type="search" data-search placeholder="any" value=${key} onInput=${(e) => setKey(e.target.value)} /><//>
      <div class="browse-acts">
        <button type="submit">Show</button>
        <button type="button" aria-pressed=${live} class=${live ? "live" : ""} onClick=${() => setLive(!live)}>${live ? "Stop following" : "Follow live"}</button>
        <button type="button" class="primary" data-new onClick=${() => setProduces(true)}>Produce</button>
      </div>
    </form>
    ${live ? html`<${Live} key=${`live-${partition}-${wanted.key}`} topic=${name} partition=${partition} filter=${wanted.key} />`
      : html`<${Paged} key=${`${partition}-${wanted.go}`} topic=${name} partition=${partition} wanted=${wanted} />`}
    ${produces && html`<${Produce} topic=${name} partitions=${topic.partitions_count} onClose=${() => setProduces(false)}
      done=${(placed) => { setProduces(false); setPartition(placed.partition_id); setFrom("newest"); look({ from: "newest", at: "" }); }} />`}
  <//>`;
}

const keyHas = (record, text) => !text || decode(record.key).text.toLowerCase().includes(text.toLowerCase());

// A page: {records, first, next, start, end, seen}. It has all matching records of [first, next).
// Key compaction removes records, so a page can span more offsets than it has records: the previous
// page has the newest records before `first`, and the next page begins at `next`.

/** Return the records from `place` (an offset or a time) on. */
async function pageAfter(topic, partition, place, filter, signal, onProgress) {
  const found = { records: [], seen: 0 };
  for (let at = place; ; at = { offset: found.next }) {
    const page = await fetchRecords(topic, partition, { ...at, ...limits(filter), signal });
    const from = at.offset === "earliest" ? page.start : at.offset;
    found.first ??= from ?? page.records[0]?.offset ?? page.next;
    Object.assign(found, { start: page.start, end: page.end, next: page.next });
    for (const record of page.records) {
      found.seen += 1;
      if (keyHas(record, filter)) found.records.push(record);
      if (found.records.length === PAGE) return { ...found, next: record.offset + 1 };
    }
    onProgress(found.seen);
    if (page.next >= page.end || found.seen >= SCAN_RECORDS || !filter) return found;
  }
}

/** Return the newest records before an offset, or before the end of the partition. */
async function pageBefore(topic, partition, before, filter, signal, onProgress) {
  const found = { records: [], seen: 0 };
  for (let at = before; ; at = found.first) {
    const page = await fetchRecords(topic, partition, { before: at, ...limits(filter), signal });
    found.next ??= page.next;
    Object.assign(found, { start: page.start, end: page.end, first: page.first });
    for (const record of page.records.reverse()) {
      found.seen += 1;
      if (keyHas(record, filter)) found.records.unshift(record);
      if (found.records.length === PAGE) return { ...found, first: record.offset };
    }
    onProgress(found.seen);
    if (page.first <= page.start || found.seen >= SCAN_RECORDS || !filter) return found;
  }
}

/** Without a filter, a page of records is enough. */
const limits = (filter) => ({ maxBytes: SCAN_BYTES, maxRecords: filter ? undefined : PAGE });

async function firstPage(topic, partition, { from, at, key }, signal, onProgress) {
  if (from === "newest") return pageBefore(topic, partition, "latest", key, signal, onProgress);
  let place = { offset: "earliest" };
  if (from === "time") place = { timestamp: new Date(at).getTime() };
  if (from === "offset") {
    const { start, end } = await fetchRecords(topic, partition, { offset: "earliest", maxBytes: 1, signal });
    place = { offset: Math.min(Math.max(Number(at), start), end) };
  }
  return pageAfter(topic, partition, place, key, signal, onProgress);
}

function Paged({ topic, partition, wanted }) {
  const [page, setPage] = useState(null);
  const [error, setError] = useState(null);
  const [seen, setSeen] = useState(0);
  const gone = useRef(null);
  const load = async (read, place) => {
    gone.current?.abort();
    const own = gone.current = new AbortController();
    setError(null);
    setPage(null);
    setSeen(0);
    try {
      const found = await read(topic, partition, place, wanted.key, own.signal, setSeen);
      if (!own.signal.aborted) setPage(found);
    } catch (problem) {
      if (!own.signal.aborted) setError(problem);
    }
  };
  useEffect(() => {
    load((name, number, _, key, signal, onProgress) => firstPage(name, number, wanted, signal, onProgress));
    return () => gone.current?.abort();
  }, []);
  if (error) return html`<${Problem} error=${error} />`;
  if (!page) return html`<p class="muted" aria-busy="true">Reading${seen ? `, ${count(seen)} records so far` : ""}…</p>`;
  const { records } = page;
  const more = page.first > page.start ? "“Older” continues" : page.next < page.end ? "“Newer” continues" : "";
  return html`
    <div class="pager">
      <button type="button" disabled=${page.first <= page.start} onClick=${() => load(pageBefore, page.first)}>← Older</button>
      <span class="muted">${records.length ? html`offsets ${count(records[0].offset)} to ${count(records[records.length - 1].offset)}` : "nothing"} of ${count(page.start)} to ${count(page.end)}
        ${wanted.key && html` · ${count(page.seen)} searched`}</span>
      <button type="button" disabled=${page.next >= page.end} onClick=${() => load(pageAfter, { offset: page.next })}>Newer →</button>
    </div>
    ${records.length ? html`<${List} records=${records} />`
      : html`<${Empty} title=${wanted.key ? "No key matches" : "No records here"}>${wanted.key ? `${count(page.seen)} records searched${more && `: ${more}`}.` : "Follow live to see new records when they are committed."}<//>`}`;
}

/** Shows records as they are committed, the newest on top. */
function Live({ topic, partition, filter }) {
  const [records, setRecords] = useState([]);
  const [state, setState] = useState("connecting");
  const [error, setError] = useState(null);
  useEffect(() => {
    const gone = new AbortController();
    const onRecords = (more) => {
      const wanted = more.filter((record) => keyHas(record, filter)).reverse();
      setRecords((was) => [...wanted, ...was].slice(0, LIVE_MAX));
    };
    fetchRecords(topic, partition, { offset: "latest", maxBytes: 1, signal: gone.signal })
      .then((page) => follow(topic, partition, { offset: page.end, signal: gone.signal, onRecords, onState: setState }))
      .catch((problem) => gone.signal.aborted || setError(problem));
    return () => gone.abort();
  }, []);
  if (error) return html`<${Problem} error=${error} />`;
  return html`<div class="pager"><span class="live-state ${state}">${{ live: "Live", waiting: "Connection lost, reconnecting", connecting: "Connecting" }[state]}</span>
      <span class="muted">${count(records.length)} since the start${records.length >= LIVE_MAX ? ", only the newest are kept" : ""}</span></div>
    ${records.length ? html`<${List} records=${records} />` : html`<${Empty} title="Nothing new yet">Records appear here as soon as they are committed.<//>`}`;
}

function List({ records }) {
  const [open, setOpen] = useState(null);
  const shown = useMemo(() => records.map((one) => ({ ...one, k: decode(one.key), v: decode(one.value) })), [records]);
  return html`<div class="scroll"><table class="records" aria-label="Records">
    <thead><tr><th class="right">Offset</th><th class="low">Time</th><th>Key</th><th>Value</th></tr></thead>
    <tbody>${shown.map((one) => html`
      <tr key=${one.offset} class=${`opens ${open === one.offset ? "open" : ""}`} aria-expanded=${open === one.offset}
          onClick=${() => setOpen(open === one.offset ? null : one.offset)}>
        <td class="right"><button type="button" class="bare" aria-label=${`Record ${one.offset}`}>${count(one.offset)}</button></td>
        <td class="low stamp">${time(one.timestamp)}</td>
        <td class="cut key"><${Preview} of=${one.k} /></td><td class="cut"><${Preview} of=${one.v} />
          ${one.headers?.length > 0 && html` <${Badge}>${one.headers.length} headers<//>`}</td></tr>
      ${open === one.offset && html`<tr class="opened" key=${`${one.offset}-open`}><td colspan="4">
        <${Guard} what="record"><${Opened} record=${one} /><//></td></tr>`}`)}</tbody>
  </table></div>`;
}

function Preview({ of }) {
  if (of.kind === "null") return html`<span class="null">null</span>`;
  if (of.kind === "binary") return html`<span class="hex">${of.text}${of.size > 64 ? " …" : ""}</span>`;
  return html`<span>${of.text.length > 300 ? `${of.text.slice(0, 300)}…` : of.text || html`<span class="null">empty</span>`}</span>`;
}

