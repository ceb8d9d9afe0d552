// The cluster's metadata in the store: the newest WAL entries, checkpoints, brokers, sizes of the
// state.

import { html } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { Badge, Card, Empty, Loaded, Stat, usePoll } from "./parts.js";
import { bytes, count, duration, time } from "./format.js";

async function load(signal) {
  const [seen, overview] = await Promise.all([
    get("tidelog/v1/metadata", {}, signal), get("tidelog/v1/overview", {}, signal),
  ]);
  return { ...seen, brokers: overview.brokers, now: overview.now_ms };
}

export function Metadata() {
  const state = usePoll(load, 10000);
  return html`<header class="page-head"><h1>Metadata</h1>
      ${state.data && html`<p class="muted"><code>${state.data.store}</code></p>`}</header>
    <${Loaded} state=${state}>${(seen) => html`<${Seen} seen=${seen} />`}<//>`;
}

function Seen({ seen }) {
  const { counts } = seen;
  const newest = seen.checkpoints[0];
  return html`
    <div class="stats">
      <${Stat} name="WAL" value=${count(seen.wal_seq)} note=${`newest ${duration(seen.now - seen.state_time_ms)} old`} />
      <${Stat} name="Checkpoint" value=${newest ? count(newest.seq) : "none"} note=${newest ? `${count(seen.wal_seq - newest.seq)} entries since` : "none written yet"} />
      <${Stat} name="Tail" value=${count(counts.tail_runs)} note=${`chunks in ${count(counts.partitions)} partitions`} />
      <${Stat} name="Groups" value=${count(counts.groups)} note=${`${count(counts.group_offsets)} offsets, ${count(counts.group_members)} members`} />
      <${Stat} name="Producers" value=${count(counts.producer_partitions)} note="(producer, partition) pairs" />
      <${Stat} name="Being deleted" value=${count(counts.deleted_topics)} note="topics" />
    </div>
    <${Card} title="WAL" note=${`the newest ${seen.entries.length} entries; “for n”: includes n drafts that other brokers forwarded`} flush>
      ${seen.entries.length ? html`<div class="scroll"><table aria-label="WAL entries"><thead><tr><th class="right">Entry</th><th class="low">Committed</th><th class="low">By</th><th class="right">Records</th><th class="right">Size</th><th class="right low">Chunks</th><th class="right low">Commits</th><th>Actions</th></tr></thead>
        <tbody>${seen.entries.map((one) => html`<tr key=${one.seq}>
          <td class="right">${count(one.seq)}</td><td class="low stamp">${time(one.at_ms)}</td><td class="low"><span class="badged">${one.writer}${one.drafts > 0 && html`<${Badge}>for ${one.drafts}<//>`}</span></td>
          <td class="right">${count(one.records)}</td><td class="right">${bytes(one.bytes)}</td>
          <td class="right low">${count(one.chunks)}</td><td class="right low">${count(one.commits)}</td>
          <td class="wraps">${Object.entries(one.actions).map(([kind, n]) => html`<${Badge} key=${kind}>${kind}${n > 1 ? ` × ${count(n)}` : ""}<//> `)}</td></tr>`)}</tbody></table></div>`
      : html`<${Empty} title="The WAL is empty">This cluster has no entries.<//>`}
    <//>
    <div class="grid">
      <${Card} title="Checkpoints" note="the complete state after an entry" flush>
        ${seen.checkpoints.length ? html`<div class="scroll"><table aria-label="Checkpoints"><thead><tr><th class="right">After entry</th><th class="right">Size</th><th class="right">Written</th></tr></thead>
          <tbody>${seen.checkpoints.slice(0, 10).map((one) => html`<tr key=${one.seq}><td class="right">${count(one.seq)}</td><td class="right">${bytes(one.bytes)}</td><td class="right" title=${time(one.modified_ms)}>${duration(seen.now - one.modified_ms)} ago</td></tr>`)}</tbody></table></div>`
        : html`<${Empty} title="None yet">The first is written after 1,000 entries. Until then, a broker that starts reads the whole WAL.<//>`}
      <//>
      <${Card} title="Brokers" note="from their liveness objects" flush>
        <div class="scroll"><table aria-label="Brokers"><thead><tr><th>Broker</th><th>Address</th><th class="right">Up</th></tr></thead>
          <tbody>${seen.brokers.map((one) => html`<tr key=${one.number} title=${`broker id ${one.number} in the REST API`}><td><span class="badged">${one.name}${one.is_sequencer && html`<${Badge} kind="accent">sequencer<//>`}</span></td>
            <td><code>${one.address.replace("http://", "") || "none"}</code></td><td class="right">${duration(seen.now - one.started_ms)}</td></tr>`)}</tbody></table></div>
      <//>
    </div>
    <p class="muted foot">Cluster <code>${seen.cluster_id}</code>, created ${time(seen.created_ms)}.</p>`;
}
