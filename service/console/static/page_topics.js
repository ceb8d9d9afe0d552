// The list of topics, with search and creation.

import { html, useState } from "./vendor/htm-preact.js";
import { items, part, send, v3 } from "./api.js";
import { Badge, Card, Dialog, Empty, Field, Loaded, Table, say, usePoll } from "./parts.js";
import { bytes, configMeaning, count, duration, short } from "./format.js";

export const topicHref = (name, tab = "") => `#/topics/${part(name)}${tab && `/${tab}`}`;

export function Topics() {
  const [search, setSearch] = useState("");
  const [creates, setCreates] = useState(false);
  const state = usePoll((signal) => items("tidelog/v1/topics", signal), 5000);
  return html`<header class="page-head"><h1>Topics</h1>
      <div class="tools">
        <input type="search" data-search placeholder="Search  /" aria-label="Search topics" value=${search} onInput=${(e) => setSearch(e.target.value)} />
        <a href="#/defaults">Defaults</a>
        <button type="button" class="primary" data-new onClick=${() => setCreates(true)}>Create topic</button>
      </div></header>
    <${Loaded} state=${state}>${(topics) => html`<${List} topics=${topics} search=${search.trim().toLowerCase()} />`}<//>
    ${creates && html`<${Create} onClose=${() => setCreates(false)} />`}`;
}

function List({ topics, search }) {
  const found = topics.filter((topic) => topic.topic_name.toLowerCase().includes(search));
  if (!topics.length) {
    return html`<${Empty} title="No topics yet">Create one here, or with <code>tidelog topics create</code>.<//>`;
  }
  if (!found.length) return html`<${Empty} title="Nothing found">No topic name contains “${search}”.<//>`;
  const columns = [
    { name: "Topic", of: (t) => t.topic_name, show: (t) => html`<a class="name" href=${topicHref(t.topic_name)}>${t.topic_name}</a>` },
    { name: "Partitions", right: true, of: (t) => t.partitions_count, show: (t) => count(t.partitions_count) },
    { name: "Records", right: true, of: (t) => t.records, show: (t) => html`<span title=${`${count(t.records)} offsets${t.cleanup_policy.includes("compact") ? "; compaction removes some of their records" : ""}`}>${t.cleanup_policy.includes("compact") && t.records > 0 ? "≤ " : ""}${short(t.records)}</span>` },
    { name: "Unsealed", right: true, of: (t) => t.unsealed_bytes, show: (t) => bytes(t.unsealed_bytes) },
    { name: "Oldest unsealed", right: true, low: true, of: (t) => -(t.unsealed_since_ms ?? Infinity), show: (t) => (t.unsealed_since_ms ? duration(Date.now() - t.unsealed_since_ms) : "–") },
    { name: "Cleanup", low: true, of: (t) => t.cleanup_policy, show: (t) => html`<${Badge} kind=${t.cleanup_policy === "delete" ? "" : "accent"}>${t.cleanup_policy}<//>` },
    { name: "Retention", right: true, low: true, of: (t) => (t.retention_ms < 0 ? Infinity : t.retention_ms), show: (t) => configMeaning("retention.ms", String(t.retention_ms)) },
  ];
  return html`<${Card} flush><${Table} label="Topics" columns=${columns} rows=${found} id=${(t) => t.topic_name} href=${(t) => topicHref(t.topic_name)} /><//>
    <p class="muted foot">${count(found.length)} of ${count(topics.length)} topics</p>`;
}

function Create({ onClose }) {
  const [name, setName] = useState("");
  const [partitions, setPartitions] = useState("6");
  const [policy, setPolicy] = useState("");
  const [days, setDays] = useState("");
  const isName = /^[a-zA-Z0-9._-]{1,222}$/.test(name) && name !== "." && name !== "..";
  const create = async () => {
    const configs = [];
    if (policy) configs.push({ name: "cleanup.policy", value: policy });
    if (days !== "") configs.push({ name: "retention.ms", value: Number(days) < 0 ? "-1" : String(Math.round(Number(days) * 86400000)) });
    await send("POST", `${await v3()}/topics`, { topic_name: name, partitions_count: Number(partitions), configs });
    say(`Topic ${name} created.`);
    location.hash = topicHref(name);
  };
  return html`<${Dialog} title="Create a topic" submit="Create" ready=${isName && Number(partitions) >= 1} onClose=${onClose} onSubmit=${create}>
    <${Field} label="Name" note=${name && !isName ? "Letters, digits, dot, dash and underscore; at most 222 characters." : ""}>
      <input data-first name="name" autocomplete="off" spellcheck=${false} value=${name} onInput=${(e) => setName(e.target.value)} /><//>
    <div class="fields">
      <${Field} label="Partitions" note="You can add partitions later, but not remove them.">
        <input type="number" name="partitions" min="1" max="10000" value=${partitions} onInput=${(e) => setPartitions(e.target.value)} /><//>
      <${Field} label="Cleanup policy">
        <select value=${policy} onChange=${(e) => setPolicy(e.target.value)}>
          <option value="">the default</option><option value="delete">delete: by age or size</option><option value="compact">compact: newest per key</option>
          <option value="compact,delete">compact and delete</option></select><//>
      <${Field} label="Retention, days" note="Empty: the default. -1: unlimited.">
        <input type="number" min="-1" step="any" value=${days} onInput=${(e) => setDays(e.target.value)} /><//>
    </div>
  <//>`;
}
