// The Kafka clients that are connected to the brokers of the cluster.

import { html, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { Badge, Card, Empty, Loaded, Table, usePoll } from "./parts.js";
import { bytes, count, counted, duration, short, time } from "./format.js";

export function Clients() {
  const [search, setSearch] = useState("");
  const state = usePoll((signal) => get("tidelog/v1/kafka-clients", {}, signal), 5000);
  return html`<header class="page-head"><h1>Clients</h1><div class="tools">
      <input type="search" data-search placeholder="Search  /" aria-label="Search clients" value=${search} onInput=${(e) => setSearch(e.target.value)} /></div></header>
    <${Loaded} state=${state}>${(seen) => html`
      ${seen.missing_brokers.map((name) => html`<p class="warn-text" key=${name}><strong>Broker ${name} did not answer</strong>: its clients are not shown.</p>`)}
      <${List} seen=${seen} search=${search.trim().toLowerCase()} />`}<//>`;
}

const software = (c) => [c.software_name, c.software_version].filter(Boolean).join(" ");
const words = (c) => [c.broker, c.client_id, software(c), c.principal, c.address].join("\n").toLowerCase();
const id = (c) => [c.broker_id, c.client_id, software(c), c.principal, c.address, c.is_tls].join("\n");

function List({ seen, search }) {
  if (!seen.clients.length) {
    return html`<${Empty} title="No Kafka clients">A client appears while it is connected to the port for Kafka clients: <code>tidelog serve --kafka-port 9092</code>.<//>`;
  }
  const found = seen.clients.filter((one) => words(one).includes(search));
  if (!found.length) return html`<${Empty} title="Nothing found">No client, library, principal, address or broker contains “${search}”.<//>`;
  const columns = [
    { name: "Client", of: (c) => c.client_id, show: (c) => html`<span class="badged"><span class="name">${c.client_id || "–"}</span>${c.is_tls && html`<${Badge} kind="good">TLS<//>`}</span>` },
    { name: "Software", low: true, of: software, show: (c) => software(c) || "–" },
    { name: "Principal", low: true, of: (c) => c.principal, show: (c) => c.principal || "–" },
    { name: "Address", of: (c) => c.address, show: (c) => html`<code>${c.address}</code>` },
    { name: "Broker", low: true, of: (c) => c.broker, show: (c) => c.broker },
    { name: "Connections", right: true, of: (c) => c.connections, show: (c) => count(c.connections) },
    { name: "Requests", right: true, low: true, of: (c) => c.requests, show: (c) => html`<span title=${count(c.requests)}>${short(c.requests)}</span>` },
    { name: "In", right: true, low: true, of: (c) => c.bytes_in, show: (c) => bytes(c.bytes_in) },
    { name: "Out", right: true, low: true, of: (c) => c.bytes_out, show: (c) => bytes(c.bytes_out) },
    { name: "Since", right: true, of: (c) => -c.connected_ms, show: (c) => html`<span title=${time(c.connected_ms)}>${duration(seen.now_ms - c.connected_ms)}</span>` },
  ];
  const note = seen.is_truncated ? " · other clients have fewer connections" : "";
  return html`<${Card} flush><${Table} label="Clients" columns=${columns} rows=${found} id=${id} sorted=${{ by: 5, down: true }} /><//>
    <p class="muted foot">${count(found.length)} of ${counted(seen.clients.length, "client")} · ${counted(seen.connections, "connection")}${note}</p>`;
}
