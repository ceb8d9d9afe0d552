// The cluster's defaults: the configs of topics that do not set them, and of new topics.

import { html, useState } from "./vendor/htm-preact.js";
import { get, v3 } from "./api.js";
import { Card, Loaded, usePoll } from "./parts.js";
import { ConfigTable, EditConfig } from "./configs.js";

async function load(signal) {
  const url = `${await v3()}/broker-configs`;
  const [configs, docs] = await Promise.all([get(url, {}, signal), get("tidelog/v1/topic-configs", {}, signal)]);
  const known = new Map(docs.map((one) => [one.default_name, one]));
  const described = (one) => ({ ...one, doc: known.get(one.name)?.doc, topicConfig: known.get(one.name)?.name });
  return { url, configs: configs.data.map(described) };
}

export function Defaults() {
  const state = usePoll(load, 0);
  const [edited, setEdited] = useState(null);
  return html`<header class="page-head"><h1><a class="crumb" href="#/topics">Topics</a> <span class="name">Defaults</span></h1></header>
    <p class="muted">Topics that do not set a config have the cluster's default. A changed default is in effect at once, for existing topics, too: a shorter retention deletes records.</p>
    <${Loaded} state=${state}>${({ url, configs }) => html`
      <${Card} title="Defaults of the cluster" note="Kafka's names for configs of brokers" flush>
        <${ConfigTable} label="Defaults" configs=${configs} onChange=${setEdited} /><//>
      ${edited && html`<${EditConfig} url=${`${url}:alter`} preview="tidelog/v1/defaults:preview" own="DYNAMIC_DEFAULT_BROKER_CONFIG" config=${edited} onClose=${() => setEdited(null)} done=${() => { setEdited(null); state.again(); }} />`}`}<//>`;
}
