// One topic: its storage layout, its records, its configs, and its deletion.

import { html, useState } from "./vendor/htm-preact.js";
import { get, part, request, send, v3 } from "./api.js";
import { Card, Dialog, Field, Loaded, Problem, TypedConfirmation, say, usePoll } from "./parts.js";
import { count } from "./format.js";
import { ConfigTable, EditConfig } from "./configs.js";
import { Picture } from "./picture.js";
import { Records } from "./records.js";
import { topicHref } from "./page_topics.js";

const TABS = [["picture", "Layout"], ["records", "Records"], ["configs", "Configuration"]];

export function Topic({ name, tab, query }) {
  return html`<header class="page-head">
      <h1><a class="crumb" href="#/topics">Topics</a> <span class="name">${name}</span></h1></header>
    <div class="tabs" role="tablist" aria-label="Views of the topic">${TABS.map(([id, title]) => html`
      <a key=${id} role="tab" aria-selected=${tab === id} href=${topicHref(name, id)}>${title}</a>`)}</div>
    ${tab === "picture" && html`<${Picture} name=${name} />`}
    ${tab === "records" && html`<${Records} name=${name} query=${query} />`}
    ${tab === "configs" && html`<${Configs} name=${name} />`}
    ${!TABS.some(([id]) => id === tab) && html`<${Problem} error=${{ status: 404, message: "The console does not have this page." }} />`}`;
}

async function loadConfigs(name, signal) {
  const base = `${await v3()}/topics/${part(name)}`;
  const [topic, configs, docs] = await Promise.all([
    get(base, {}, signal), get(`${base}/configs`, {}, signal), get("tidelog/v1/topic-configs", {}, signal),
  ]);
  const known = new Map(docs.map((one) => [one.name, one]));
  return { base, topic, configs: configs.data.map((one) => ({ ...one, ...known.get(one.name) })) };
}

function Configs({ name }) {
  const state = usePoll((signal) => loadConfigs(name, signal), 0, [name]);
  const [edited, setEdited] = useState(null);
  const [grows, setGrows] = useState(false);
  const [deletes, setDeletes] = useState(false);
  const remove = async () => {
    await request("DELETE", `${await v3()}/topics/${part(name)}`);
    say(`Topic ${name} deleted.`);
    location.hash = "#/topics";
  };
  return html`<${Loaded} state=${state}>${({ base, topic, configs }) => html`
    <${Card} title="Configs" note="Kafka's names and meanings" flush>
      <${ConfigTable} label="Configs" configs=${configs} onChange=${setEdited} /><//>
    <${Card} title="Partitions"><div class="line"><p>${count(topic.partitions_count)} partitions. You can add more: existing records stay in their partitions, new records with the same key may go to another one.</p>
      <button type="button" onClick=${() => setGrows(true)}>Add partitions</button></div><//>
    <${Card} title="Delete this topic"><div class="line"><p>No reader can read its records from then on, and their storage is freed later. This cannot be undone.</p>
      <button type="button" class="danger" onClick=${() => setDeletes(true)}>Delete topic</button></div><//>
    ${edited && html`<${EditConfig} url=${`${base}/configs:alter`} preview=${`tidelog/v1/topics/${part(name)}/configs:preview`} own="DYNAMIC_TOPIC_CONFIG" config=${edited} onClose=${() => setEdited(null)} done=${() => { setEdited(null); state.again(); }} />`}
    ${grows && html`<${AddPartitions} base=${base} has=${topic.partitions_count} onClose=${() => setGrows(false)} done=${() => { setGrows(false); state.again(); }} />`}
    ${deletes && html`<${TypedConfirmation} title="Delete a topic" name=${name} onClose=${() => setDeletes(false)} onSubmit=${remove}
      what="This permanently deletes all its records, and the committed offsets of all groups for it." />`}`}<//>`;
}

function AddPartitions({ base, has, onClose, done }) {
  const [wanted, setWanted] = useState(String(has + 1));
  const grow = async () => {
    await send("PATCH", base, { partitions_count: Number(wanted) });
    say(`The topic has ${wanted} partitions now.`);
    done();
  };
  return html`<${Dialog} title="Add partitions" submit="Add" ready=${Number(wanted) > has} onClose=${onClose} onSubmit=${grow}>
    <${Field} label="Partitions" note=${`Now ${has}. Partitions cannot be removed.`}>
      <input data-first type="number" min=${has + 1} max="10000" value=${wanted} onInput=${(e) => setWanted(e.target.value)} /><//>
  <//>`;
}
