// One topic: its storage layout, its records, its configs, and its deletion.

import { html, useState } from "./vendor/htm-preact.js";
import { get, part, request, send, v3 } from "./api.js";
import { Badge, Card, Dialog, Field, Loaded, Problem, TypedConfirmation, say, usePoll } from "./parts.js";
import { configMeaning, count } from "./format.js";
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
    <${Card} title="Configs" note="Kafka's names and meanings" flush><div class="scroll"><table aria-label="Configs">
      <thead><tr><th>Config</th><th>Value</th><th class="low">Meaning</th><th></th></tr></thead>
      <tbody>${configs.map((one) => html`<tr key=${one.name}>
        <td class="wraps"><span class="badged"><code>${one.name.split(/(?<=\.)/).map((word) => html`${word}<wbr />`)}</code>${!one.is_default && html`<${Badge} kind="accent">set<//>`}</span></td>
        <td class="wraps"><code>${one.value}</code> <span class="muted">${configMeaning(one.name, one.value)}</span></td>
        <td class="low muted wraps">${one.doc}</td>
        <td class="right"><button type="button" onClick=${() => setEdited(one)} aria-label=${`Change ${one.name}`}>Change</button></td></tr>`)}</tbody>
    </table></div><//>
    <${Card} title="Partitions"><div class="line"><p>${count(topic.partitions_count)} partitions. You can add more: existing records stay in their partitions, new records with the same key may go to another one.</p>
      <button type="button" onClick=${() => setGrows(true)}>Add partitions</button></div><//>
    <${Card} title="Delete this topic"><div class="line"><p>No reader can read its records from then on, and their storage is freed later. This cannot be undone.</p>
      <button type="button" class="danger" onClick=${() => setDeletes(true)}>Delete topic</button></div><//>
    ${edited && html`<${EditConfig} base=${base} config=${edited} onClose=${() => setEdited(null)} done=${() => { setEdited(null); state.again(); }} />`}
    ${grows && html`<${AddPartitions} base=${base} has=${topic.partitions_count} onClose=${() => setGrows(false)} done=${() => { setGrows(false); state.again(); }} />`}
    ${deletes && html`<${TypedConfirmation} title="Delete a topic" name=${name} onClose=${() => setDeletes(false)} onSubmit=${remove}
      what="This permanently deletes all its records, and the committed offsets of all groups for it." />`}`}<//>`;
}

function EditConfig({ base, config, onClose, done }) {
  const [value, setValue] = useState(config.value);
  const change = async () => {
    const data = value === config.default
      ? [{ name: config.name, operation: "DELETE" }] : [{ name: config.name, value }];
    await send("POST", `${base}/configs:alter`, { data });
    say(`${config.name} set to ${value}.`);
    done();
  };
  return html`<${Dialog} title=${config.name} onClose=${onClose} onSubmit=${change}>
    <p class="muted">${config.doc}</p>
    <${Field} label="Value" note=${configMeaning(config.name, value) || `default ${config.default}`}>
      <input data-first value=${value} spellcheck=${false} onInput=${(e) => setValue(e.target.value)} /><//>
    <button type="button" onClick=${() => setValue(config.default)}>Default: ${config.default}</button>
  <//>`;
}

function AddPartitions({ base, has, onClose, done }) {
  const [wanted, setWanted] = useState(String(has + 1));
  const grow = async () => {
    await send("PATCH", base, { partitions_count: Number(wanted) });
    say(`The topic has ${wanted} partitions now.`);
    done();
  };
  return html`<${Dialog} title="Add partitions" submit="Add" ready=${Number(wanted) > has} onClose=${onClose} onSubmit=${grow}>
    <${Field} label="Partitions" note=${`Now ${has}. The number can never shrink.`}>
      <input data-first type="number" min=${has + 1} max="10000" value=${wanted} onInput=${(e) => setWanted(e.target.value)} /><//>
  <//>`;
}
