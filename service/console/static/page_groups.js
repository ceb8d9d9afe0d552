// Consumer groups: the list.

import { html, useState } from "./vendor/htm-preact.js";
import { items, part } from "./api.js";
import { Badge, Card, Empty, Loaded, Table, usePoll } from "./parts.js";
import { count, short } from "./format.js";

export const groupHref = (id) => `#/groups/${part(id)}`;

export function Groups() {
  const [search, setSearch] = useState("");
  const state = usePoll((signal) => items("tidelog/v1/groups", signal), 5000);
  return html`<header class="page-head"><h1>Groups</h1><div class="tools">
      <input type="search" data-search placeholder="Search  /" aria-label="Search groups" value=${search} onInput=${(e) => setSearch(e.target.value)} /></div></header>
    <${Loaded} state=${state}>${(groups) => html`<${List} groups=${groups} search=${search.trim().toLowerCase()} />`}<//>`;
}

function List({ groups, search }) {
  if (!groups.length) {
    return html`<${Empty} title="No consumer groups">A group appears when a member joins it or an offset is committed for it: <code>tidelog consume TOPIC --group GROUP</code>.<//>`;
  }
  const found = groups.filter((one) => one.consumer_group_id.toLowerCase().includes(search));
  if (!found.length) return html`<${Empty} title="Nothing found">No group name contains “${search}”.<//>`;
  const columns = [
    { name: "Group", of: (g) => g.consumer_group_id, show: (g) => html`<a class="name" href=${groupHref(g.consumer_group_id)}>${g.consumer_group_id}</a>` },
    { name: "State", of: (g) => g.state, show: (g) => html`<${Badge} kind=${g.state === "STABLE" ? "good" : ""}>${g.state.toLowerCase().replace("_", " ")}<//>` },
    { name: "Members", right: true, of: (g) => g.members, show: (g) => count(g.members) },
    { name: "Lag", right: true, of: (g) => g.total_lag, show: (g) => html`<span class=${g.total_lag ? "" : "muted"} title=${count(g.total_lag)}>${short(g.total_lag)}</span>` },
    { name: "Worst partition", right: true, low: true, of: (g) => g.max_lag, show: (g) => short(g.max_lag) },
    { name: "Topics", low: true, of: (g) => g.topics.length, show: (g) => html`<span class="cut">${g.topics.slice(0, 3).join(", ") || "–"}${g.topics.length > 3 ? ` and ${g.topics.length - 3} more` : ""}</span>` },
    { name: "Generation", right: true, low: true, of: (g) => g.generation, show: (g) => count(g.generation) },
  ];
  return html`<${Card} flush><${Table} label="Groups" columns=${columns} rows=${found} id=${(g) => g.consumer_group_id} href=${(g) => groupHref(g.consumer_group_id)} sorted=${{ by: 3, down: true }} /><//>
    <p class="muted foot">${count(found.length)} of ${count(groups.length)} groups</p>`;
}
