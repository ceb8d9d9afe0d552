// Configs of a topic, or defaults of the cluster: a table with the source of each value, and the
// dialog that changes one.

import { html, useState } from "./vendor/htm-preact.js";
import { send } from "./api.js";
import { Badge, Dialog, Field, say } from "./parts.js";
import { bytes, configMeaning, counted } from "./format.js";

/** The badge of a source. A built-in default has none. */
const SOURCES = {
  DYNAMIC_TOPIC_CONFIG: ["set", "set by the topic", "accent"],
  DYNAMIC_DEFAULT_BROKER_CONFIG: ["cluster", "a default of the cluster", "accent"],
  STATIC_BROKER_CONFIG: ["broker", "a setting of the broker that answered", ""],
};

/** Show configs that have `doc`. `topicConfig`, if a default has it, is the topic config's name. */
export function ConfigTable({ label, configs, onChange }) {
  return html`<div class="scroll"><table aria-label=${label}>
    <thead><tr><th>Config</th><th>Value</th><th class="low">Meaning</th><th></th></tr></thead>
    <tbody>${configs.map((one) => html`<tr key=${one.name}>
      <td class="wraps"><span class="badged"><code>${one.name.split(/(?<=\.)/).map((word) => html`${word}<wbr />`)}</code><${Origin} source=${one.source} /></span></td>
      <td class="wraps"><code>${one.value}</code> <span class="muted">${meaning(one, one.value)}</span></td>
      <td class="low muted wraps">${one.doc}</td>
      <td class="right"><button type="button" onClick=${() => onChange(one)} aria-label=${`Change ${one.name}`}>Change</button></td></tr>`)}</tbody>
  </table></div>`;
}

function Origin({ source }) {
  const [word, title, kind] = SOURCES[source] || [];
  return word && html`<span title=${title}><${Badge} kind=${kind}>${word}<//></span>`;
}

function meaning(config, value) {
  return configMeaning(config.topicConfig || config.name, value);
}

/** A change of a config whose name has one of these words may make retention delete records. */
const RETENTION = /retention|cleanup\.policy/;

/**
 * Change one config by a POST to `url`. `own` is the source of the values that it sets. If retention
 * would then delete records (a POST to `preview` says which), ask before the change.
 */
export function EditConfig({ url, preview, own, config, onClose, done }) {
  const [value, setValue] = useState(config.value);
  const [loss, setLoss] = useState(null);
  const inherited = config.synonyms.find((one) => one.source !== own) || config;
  const choose = (text) => { setValue(text); setLoss(null); };
  const change = async () => {
    const data = value === inherited.value
      ? [{ name: config.name, operation: "DELETE" }] : [{ name: config.name, value }];
    if (!loss && RETENTION.test(config.name)) {
      const expired = await send("POST", preview, { data });
      if (expired.records) return setLoss(expired);
    }
    await send("POST", url, { data });
    say(`${config.name} set to ${value}.`);
    done();
  };
  const records = loss && `${loss.has_more ? "at least " : ""}${counted(loss.records, "record")}`;
  return html`<${Dialog} title=${config.name} danger=${loss !== null} submit=${loss ? `Delete ${records}` : "Save"} onClose=${onClose} onSubmit=${change}>
    <p class="muted">${config.doc}</p>
    <${Field} label="Value" note=${meaning(config, value) || `default ${inherited.value}`}>
      <input data-first value=${value} spellcheck=${false} onInput=${(e) => choose(e.target.value)} /><//>
    <button type="button" onClick=${() => choose(inherited.value)}>Default: ${inherited.value}</button>
    ${loss && html`<p class="warn-text" role="alert">With this value, retention deletes ${records} (${bytes(loss.bytes)}) that it keeps now. This cannot be undone.</p>`}
  <//>`;
}
