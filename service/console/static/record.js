// One open record: its key, value and headers, formatted or as hex.

import { html, useState } from "./vendor/htm-preact.js";
import { Choice, say } from "./parts.js";
import { bytes, decode, hexDump, time } from "./format.js";

const SHOWN_MAX = 200_000;

export function Opened({ record }) {
  return html`<div class="record">
    <p class="muted">partition ${record.partition} · offset ${record.offset} · ${time(record.timestamp)} · ${record.timestamp}</p>
    ${record.headers?.length > 0 && html`<h4>Headers</h4><dl class="headers">${record.headers.map((one, at) => html`
      <dt key=${at}>${one.key ?? one.name}</dt><dd>${decode(one.value).text}</dd>`)}</dl>`}
    <${Bytes} name="Key" of=${record.k} />
    <${Bytes} name="Value" of=${record.v} />
  </div>`;
}

function Bytes({ name, of }) {
  const [form, setForm] = useState(of.kind === "binary" ? "hex" : of.kind);
  if (of.kind === "null") return html`<h4>${name} <span class="null">null</span></h4>`;
  const forms = [of.kind === "json" && ["json", "JSON"], of.kind !== "binary" && ["text", "Text"], ["hex", "Hex"]].filter(Boolean);
  const shown = { json: () => JSON.stringify(of.json, null, 2), text: () => of.text, hex: () => hexDump(of.data) }[form]();
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(shown);
      say(`${name} copied.`);
    } catch {
      say("This browser does not allow the page to copy.", "bad");
    }
  };
  return html`<div class="bytes"><div class="line"><h4>${name} <span class="muted">${bytes(of.size)}</span></h4>
      <div class="actions"><${Choice} label=${`${name} as`} value=${form} options=${forms} onChange=${setForm} />
        <button type="button" class="quiet" onClick=${copy}>Copy</button></div></div>
    <pre tabindex="0">${shown.length > SHOWN_MAX ? `${shown.slice(0, SHOWN_MAX)}\n… truncated` : shown}</pre></div>`;
}
