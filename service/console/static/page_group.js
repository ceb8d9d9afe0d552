// One consumer group: its members, their partitions, its lag now and over time; reset and deletion.

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { get, part, request, send, v3 } from "./api.js";
import { Badge, Card, Dialog, Empty, Field, Loaded, Stat, Table, TypedConfirmation, say, usePoll } from "./parts.js";
import { Plot } from "./plot.js";
import { count, counted, short } from "./format.js";

const LINES_MAX = 6;

async function load(name, signal) {
  const base = `${await v3()}/consumer-groups/${part(name)}`;
  const group = await get(base, {}, signal);
  const [members, lags, history] = await Promise.all([
    get(`${base}/consumers`, {}, signal),
    get(`${base}/lags`, {}, signal),
    get(`tidelog/v1/groups/${part(name)}/lag-history`, {}, signal),
  ]);
  const assignments = await Promise.all(members.data.map(
    (one) => get(`${base}/consumers/${part(one.consumer_id)}/assignments`, {}, signal),
  ));
  return {
    base,
    group,
    members: members.data.map((one, at) => ({ ...one, reads: assignments[at].data })),
    lags: lags.data,
    history,
  };
}

export function Group({ name }) {
  const state = usePoll((signal) => load(name, signal), 5000, [name]);
  const [resets, setResets] = useState(false);
  const [deletes, setDeletes] = useState(false);
  const remove = async () => {
    await request("DELETE", `${await v3()}/consumer-groups/${part(name)}`);
    say(`Group ${name} deleted.`);
    location.hash = "#/groups";
  };
  return html`<header class="page-head"><h1><a class="crumb" href="#/groups">Groups</a> <span class="name">${name}</span></h1>
      ${state.data && html`<div class="tools"><button type="button" onClick=${() => setResets(true)}>Reset offsets</button>
        <button type="button" class="danger" onClick=${() => setDeletes(true)}>Delete group</button></div>`}</header>
    <${Loaded} state=${state}>${(seen) => html`<${Seen} seen=${seen} />
      ${resets && html`<${Reset} seen=${seen} onClose=${() => setResets(false)} done=${() => { setResets(false); state.again(); }} />`}`}<//>
    ${deletes && html`<${TypedConfirmation} title="Delete a group" name=${name} onClose=${() => setDeletes(false)} onSubmit=${remove}
      what="Its committed offsets are deleted. Members that join again start at the offset that their auto.offset.reset defines." />`}`;
}

function Seen({ seen }) {
  const { group, members, lags, history } = seen;
  const total = lags.reduce((sum, one) => sum + one.lag, 0);
  const worst = lags.reduce((most, one) => (one.lag > (most?.lag ?? -1) ? one : most), null);
  return html`
    <div class="stats">
      <${Stat} name="State" value=${group.state.toLowerCase().replace("_", " ")} note=${`generation ${count(group.generation)}`} />
      <${Stat} name="Members" value=${count(members.length)} note=${group.assigned_by === "CLIENTS" ? `${group.partition_assignor}, Kafka clients` : group.partition_assignor} />
      <${Stat} name="Lag" value=${short(total)} note=${counted(lags.length, "partition")} title=${`${count(total)} records`} />
      <${Stat} name="Worst partition" value=${worst ? short(worst.lag) : "–"} note=${worst ? `${worst.topic_name}-${worst.partition_id}` : ""} />
    </div>
    <${Held} held=${group.held_members ?? []} />
    <${LagPlot} history=${history} />
    <${Lags} lags=${lags} />
    <${Members} members=${members} />`;
}

function Held({ held }) {
  if (!held.length) return null;
  const columns = [
    { name: "Member", of: (h) => h.instance_id || h.consumer_id, show: (h) => html`<span class="name">${h.instance_id || h.consumer_id}</span>` },
    { name: "Client", low: true, of: (h) => h.client_id, show: (h) => h.client_id || "–" },
    { name: "Address", low: true, of: (h) => h.host, show: (h) => h.host || "–" },
    { name: "Short lives", right: true, of: (h) => h.short_lives, show: (h) => count(h.short_lives) },
    { name: "Next join in", right: true, of: (h) => h.retry_after_ms, show: (h) => `${Math.ceil(h.retry_after_ms / 1000)} s` },
  ];
  return html`<${Card} title="Held members" flush note="clients that join and leave too often: their next join waits, so that the other members are not rebalanced each time">
    <${Table} label="Held members" columns=${columns} rows=${held} id=${(h) => `${h.instance_id}-${h.client_id}-${h.host}`} /><//>`;
}

function LagPlot({ history }) {
  const topics = Object.entries(history.topics);
  const series = useMemo(() => topics.slice(0, LINES_MAX).map(([name, values], at) => ({ name, values, colour: `--line-${at + 1}` })),
    [history.at_ms[history.at_ms.length - 1], topics.length]);
  return html`<${Card} title="Lag over time" note=${`records, by topic${topics.length > LINES_MAX ? `; the first ${LINES_MAX} of ${topics.length}` : ""}`}>
    ${history.at_ms.length > 1 ? html`<${Plot} label="Lag over time" atMs=${history.at_ms} series=${series} show=${short} />`
      : html`<p class="muted plot-wait">The first values appear within ten seconds of the first commit.</p>`}
  <//>`;
}

function Lags({ lags }) {
  if (!lags.length) return html`<${Card} title="Partitions"><${Empty} title="Nothing committed yet">The group has no committed offset, and no member reads.<//><//>`;
  const largest = Math.max(...lags.map((one) => one.lag), 1);
  const columns = [
    { name: "Topic", of: (l) => `${l.topic_name}\u0000${String(l.partition_id).padStart(6, "0")}`, show: (l) => html`<a href=${`#/topics/${part(l.topic_name)}`}>${l.topic_name}</a>` },
    { name: "Partition", right: true, of: (l) => l.partition_id, show: (l) => l.partition_id },
    { name: "Position", right: true, low: true, of: (l) => l.current_offset, show: (l) => html`<a href=${`#/topics/${part(l.topic_name)}/records?p=${l.partition_id}&from=offset&at=${l.current_offset}`}>${count(l.current_offset)}</a>${l.is_committed ? "" : html` <span class="muted">not committed</span>`}` },
    { name: "End", right: true, low: true, of: (l) => l.log_end_offset, show: (l) => count(l.log_end_offset) },
    { name: "Lag", right: true, of: (l) => l.lag, show: (l) => html`<span class="lag"><span class="lag-bar" aria-hidden="true"><span style=${{ width: `${l.lag / largest * 100}%` }}></span></span><span>${count(l.lag)}</span></span>` },
    { name: "Read by", low: true, of: (l) => l.consumer_id, show: (l) => html`<span class="cut">${l.consumer_id || html`<span class="muted">no member</span>`}</span>` },
  ];
  return html`<${Card} title="Partitions" flush><${Table} label="Lag" columns=${columns} rows=${lags} id=${(l) => `${l.topic_name}-${l.partition_id}`} /><//>`;
}

function Members({ members }) {
  if (!members.length) return html`<${Card} title="Members"><${Empty} title="No members">Committed offsets are kept for a week after the last commit.<//><//>`;
  const reads = (member) => {
    const byTopic = new Map();
    for (const one of member.reads) byTopic.set(one.topic_name, [...(byTopic.get(one.topic_name) ?? []), one.partition_id]);
    return [...byTopic].map(([topic, numbers]) => `${topic}: ${numbers.join(", ")}`).join(" · ");
  };
  const columns = [
    { name: "Member", of: (m) => m.consumer_id, show: (m) => html`<span class="name">${m.consumer_id}</span>${m.instance_id && html` <${Badge}>static ${m.instance_id}<//>`}` },
    { name: "Client", low: true, of: (m) => m.client_id, show: (m) => m.client_id || "–" },
    { name: "Address", low: true, of: (m) => m.host, show: (m) => m.host || "–" },
    { name: "Partitions", right: true, of: (m) => m.reads.length, show: (m) => count(m.reads.length) },
    { name: "Reads", show: (m) => html`<span class="wraps">${reads(m) || "–"}</span>` },
  ];
  return html`<${Card} title="Members" flush><${Table} label="Members" columns=${columns} rows=${members} id=${(m) => m.consumer_id} /><//>`;
}

const TARGETS = [
  ["EARLIEST", "the first record"], ["LATEST", "after the last record"], ["OFFSET", "an offset"],
  ["TIMESTAMP", "a time"], ["DURATION", "a time ago"],
];

/** Resets offsets, always after a preview. */
function Reset({ seen, onClose, done }) {
  const [to, setTo] = useState("EARLIEST");
  const [value, setValue] = useState("");
  const [topic, setTopic] = useState("");
  const [preview, setPreview] = useState(null);
  const topics = [...new Set(seen.lags.map((one) => one.topic_name))];
  const changed = (set) => (event) => {
    set(event.target.value);
    setPreview(null);
  };
  const body = (validateOnly) => ({
    to,
    ...(topic && { topic_name: topic }),
    ...(to === "OFFSET" && { offset: Number(value) }),
    ...(to === "TIMESTAMP" && { timestamp: new Date(value).toISOString() }),
    ...(to === "DURATION" && { duration_ms: Math.round(Number(value) * 60000) }),
    ...(validateOnly && { validate_only: true }),
  });
  const act = async () => {
    const said = await send("POST", `${seen.base}/offsets:reset`, body(preview === null));
    if (preview === null) {
      setPreview(said.data);
      return;
    }
    say(`Offsets of ${seen.group.consumer_group_id} reset.`);
    done();
  };
  const ready = !["OFFSET", "TIMESTAMP", "DURATION"].includes(to) || value !== "";
  return html`<${Dialog} title="Reset offsets" wide submit=${preview === null ? "Preview" : "Reset now"} danger=${preview !== null} ready=${ready} onClose=${onClose} onSubmit=${act}>
    ${seen.members.length > 0 && html`<p class="warn-text">The group has members: stop them first, else the broker refuses the reset.</p>`}
    <div class="fields">
      <${Field} label="Reset to"><select data-first name="to" value=${to} onChange=${changed(setTo)}>${TARGETS.map(([key, name]) => html`<option key=${key} value=${key}>${name}</option>`)}</select><//>
      ${to === "OFFSET" && html`<${Field} label="Offset" note="Or the nearest available offset."><input type="number" min="0" value=${value} onInput=${changed(setValue)} /><//>`}
      ${to === "TIMESTAMP" && html`<${Field} label="Time"><input type="datetime-local" step="1" value=${value} onInput=${changed(setValue)} /><//>`}
      ${to === "DURATION" && html`<${Field} label="Minutes ago"><input type="number" min="0" step="any" value=${value} onInput=${changed(setValue)} /><//>`}
      <${Field} label="Topic"><select name="topic" value=${topic} onChange=${changed(setTopic)}>
        <option value="">all with committed offsets</option>${topics.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select><//>
    </div>
    ${preview !== null && html`<${Preview} rows=${preview} lags=${seen.lags} />`}
  <//>`;
}

function Preview({ rows, lags }) {
  const now = new Map(lags.map((one) => [`${one.topic_name}-${one.partition_id}`, one.current_offset]));
  return html`<div class="scroll tall"><table aria-label="Preview"><thead><tr><th>Partition</th><th class="right">Now</th><th class="right">After reset</th><th class="right">Moves by</th></tr></thead>
    <tbody>${rows.map((one) => {
      const where = `${one.topic_name}-${one.partition_id}`;
      const was = now.get(where);
      const by = was === undefined ? null : one.offset - was;
      return html`<tr key=${where}><td>${where}</td><td class="right">${was === undefined ? "–" : count(was)}</td><td class="right">${count(one.offset)}</td>
        <td class="right">${by === null ? "–" : `${by > 0 ? "+" : ""}${count(by)}`}</td></tr>`;
    })}</tbody></table></div>`;
}
