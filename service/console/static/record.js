// One open record: its key, value and headers, formatted or as hex.

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { Choice, say } from "./parts.js";
import { HEX_MAX, bytes, decode, hex, hexDump, indented, time } from "./format.js";

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
  const [whole, setWhole] = useState(false);
  const shown = useMemo(() => of.kind !== "null" && {
    json: () => indented(of.text), text: () => of.text, hex: () => hexDump(of.data, whole ? Infinity : undefined),
  }[form](), [of, form, whole]);
  if (of.kind === "null") return html`<h4>${name} <span class="null">null</span></h4>`;
  const forms = [of.kind === "json" && ["json", "JSON"], of.kind !== "binary" && ["text", "Text"], ["hex", "Hex"]].filter(Boolean);
  const isCut = !whole && (shown.length > SHOWN_MAX || (form === "hex" && of.size > HEX_MAX));
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(form === "hex" ? hex(of.data) : of.text);
      say(`${name} copied as it is stored.`);
    } catch {
      say("This browser does not allow the page to copy.", "bad");
    }
  };
  return html`<div class="bytes"><div class="line"><h4>${name} <span class="muted">${bytes(of.size)}</span></h4>
      <div class="actions"><${Choice} label=${`${name} as`} value=${form} options=${forms} onChange=${setForm} />
        <button type="button" class="quiet" onClick=${copy}>Copy</button></div></div>
    <pre tabindex="0">${isCut ? shown.slice(0, SHOWN_MAX) : shown}</pre>
    ${isCut && html`<p class="muted">The ${name.toLowerCase()} is longer. <button type="button" onClick=${() => setWhole(true)}>Show all</button></p>`}</div>`;
}
