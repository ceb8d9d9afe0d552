// A topic's storage layout: one bar for each partition, from log start to high watermark, coloured
// by tier.

import { html, useState } from "./vendor/htm-preact.js";
import { get, part } from "./api.js";
import { Badge, Card, Empty, Loaded, Stat, usePoll } from "./parts.js";
import { bytes, count, counted, duration, short, time } from "./format.js";

const AT_ONCE = 24;
const TICKS_MAX = 48;

export function Picture({ name }) {
  const [shown, setShown] = useState(AT_ONCE);
  const [chosen, setChosen] = useState(null);
  const load = (signal) => get(`tidelog/v1/topics/${part(name)}`, { count: Math.min(shown, 100) }, signal);
  const state = usePoll(load, 5000, [name, shown]);
  return html`<${Loaded} state=${state}>${(topic) => html`<${Drawn} topic=${topic} chosen=${chosen} setChosen=${setChosen}
    more=${topic.partitions.length < Math.min(topic.partitions_count, 100) ? () => setShown(shown + 76) : null} />`}<//>`;
}

function Drawn({ topic, chosen, setChosen, more }) {
  const { partitions: rows, totals } = topic;
  const longest = Math.max(...rows.map((one) => one.high_watermark - one.log_start_offset), 1);
  const picked = rows.find((one) => one.partition_id === chosen) ?? rows.find((one) => one.files) ?? rows[0];
  return html`
    <div class="stats">
      <${Stat} name="Records" value=${short(totals.records)} note=${counted(topic.partitions_count, "partition")} title=${count(totals.records)} />
      <${Stat} name="In the table" value=${bytes(totals.table_bytes)} note=${counted(totals.files, "segment")} />
      <${Stat} name="Unsealed" value=${bytes(totals.tail_bytes)} note=${totals.unsealed_since_ms ? `oldest ${duration(Date.now() - totals.unsealed_since_ms)}` : "all in the table"} />
      <${Stat} name="Compaction" value=${totals.due ? `${totals.due} due` : "none due"} note=${`${counted(totals.merges, "merge")} to do`} />
    </div>
    <${Card} title="Partitions" note="from log start to high watermark; the length is the number of offsets" actions=${html`<${Legend} />`}>
      ${totals.records === 0 ? html`<${Empty} title="No records yet">Produce one under <a href=${`#/topics/${part(topic.topic_name)}/records`}>Records</a>.<//>` : ""}
      <ol class="bars">${rows.map((one) => html`<${Bar} key=${one.partition_id} row=${one} longest=${longest}
        chosen=${picked?.partition_id === one.partition_id} choose=${() => setChosen(one.partition_id)} />`)}</ol>
      ${more && html`<button type="button" onClick=${more}>Show more partitions</button>`}
      ${topic.partitions_count > 100 && html`<p class="muted">The first 100 of ${count(topic.partitions_count)} partitions.</p>`}
    <//>
    ${picked && html`<${Partition} row=${picked} topic=${topic.topic_name} />`}
    ${topic.table_uri && html`<${Card} title="Table" note="a Delta table of the sealed records, for Spark, DuckDB, Polars and others">
      <p class="wraps"><code>${topic.table_uri}</code></p><//>`}`;
}

function Legend() {
  return html`<ul class="legend"><li class="table">table</li><li class="wal">WAL</li><li class="hot">hot: in memory</li></ul>`;
}

function Bar({ row, longest, chosen, choose }) {
  const { log_start_offset: start, sealed_end_offset: sealed, high_watermark: end, hot_start_offset: hot } = row;
  const length = end - start;
  const share = (size) => ({ flexGrow: String(size) });
  const said = `partition ${row.partition_id}: ${count(start)} to ${count(end)}, ${count(sealed - start)} in the table, ${count(end - sealed)} in the WAL, ${count(end - hot)} in memory`;
  return html`<li class=${chosen ? "bar-row chosen" : "bar-row"}>
    <button type="button" class="bar-button" onClick=${choose} title=${said} aria-label=${said} aria-pressed=${chosen}>
      <span class="bar-number">${row.partition_id}</span>
      <span class="bar-start">${count(start)}</span>
      <span class="bar-track"><span class="bar" style=${{ width: `${Math.max(length / longest * 100, length ? 1.5 : 0)}%` }}>
        <span class="tiers">
          ${sealed > start && html`<span class=${row.segments.length > TICKS_MAX ? "tier table whole" : "tier table"} style=${share(sealed - start)}><${Ticks} row=${row} /></span>`}
          ${end > sealed && html`<span class="tier wal" style=${share(end - sealed)}></span>`}
        </span>
        <span class="memory"><span style=${share(Math.max(hot - start, 0))}></span>${end > hot && html`<span class="tier hot" style=${share(end - hot)}></span>`}</span>
      </span></span>
      <span class="bar-end">${count(end)}</span>
      <span class="bar-note">${row.compaction.is_due && html`<${Badge} kind="warn">compaction due<//>`}</span>
    </button></li>`;
}

/** Marks the limits of segments; none if there are too many. */
function Ticks({ row }) {
  if (row.segments.length > TICKS_MAX) return null;
  return row.segments.map((one) => html`<span key=${one.base_offset} class="tick" style=${{ flexGrow: String(one.end_offset - one.base_offset) }}></span>`);
}

function Partition({ row, topic }) {
  const largest = Math.max(...row.segments.map((one) => one.bytes), 1);
  const { compaction } = row;
  return html`<${Card} title=${`Partition ${row.partition_id}`} note=${`${counted(row.files, "segment")} · ${bytes(row.table_bytes)} in the table · ${counted(row.tail_runs, "chunk")} in the WAL`}
      actions=${html`<a class="button" href=${`#/topics/${part(topic)}/records?p=${row.partition_id}`}>Records</a>`}>
    <dl class="facts">
      <div><dt>Log start</dt><dd>${count(row.log_start_offset)}</dd></div>
      <div><dt>Sealed up to</dt><dd>${count(row.sealed_end_offset)}</dd></div>
      <div><dt>In memory from</dt><dd>${count(row.hot_start_offset)}</dd></div>
      <div><dt>High watermark</dt><dd>${count(row.high_watermark)}</dd></div>
      <div><dt>Unsealed since</dt><dd title=${time(row.unsealed_since_ms)}>${row.unsealed_since_ms ? `${duration(Date.now() - row.unsealed_since_ms)} ago` : "–"}</dd></div>
      <div><dt>Keys compacted up to</dt><dd>${compaction.clean_end_offset ? count(compaction.clean_end_offset) : "–"}</dd></div>
      <div><dt>Not compacted yet</dt><dd>${Math.round(compaction.dirty_ratio * 100)} %</dd></div>
      <div><dt>Merges to do</dt><dd>${count(compaction.merges)}</dd></div>
    </dl>
    ${row.error && html`<p class="warn-text"><strong>The table cannot be read</strong>: ${row.error}</p>`}
    ${row.segments.length ? html`
      <h3>Segment sizes</h3>
      <div class="sizes" role="img" aria-label=${`Sizes of ${row.segments.length} segments, the largest ${bytes(largest)}`}>
        ${row.segments.map((one) => html`<span key=${one.base_offset} style=${{ height: `${Math.max(one.bytes / largest * 100, 3)}%` }}
          title=${`${count(one.base_offset)} to ${count(one.end_offset)}: ${bytes(one.bytes)}, ${count(one.records)} records${one.files > 1 ? `, ${one.files} segments` : ""}`}></span>`)}
      </div>
      <div class="scroll"><table aria-label="Segments"><thead><tr><th class="right">From</th><th class="right">To</th><th class="right">Records</th><th class="right">Size</th><th class="low">Oldest record</th><th class="low">Newest record</th></tr></thead>
        <tbody>${row.segments.slice(-12).reverse().map((one) => html`<tr key=${one.base_offset}>
          <td class="right">${count(one.base_offset)}</td><td class="right">${count(one.end_offset)}</td><td class="right">${count(one.records)}</td>
          <td class="right">${bytes(one.bytes)}</td><td class="low">${time(one.timestamp_min)}</td><td class="low">${time(one.timestamp_max)}</td></tr>`)}</tbody></table></div>
      ${row.segments.length > 12 && html`<p class="muted">The newest 12 of ${count(row.segments.length)}.</p>`}`
    : html`<p class="muted">No segment is sealed yet: the records are in the WAL until <code>segment.ms</code> or <code>segment.bytes</code> is reached.</p>`}
  <//>`;
}
