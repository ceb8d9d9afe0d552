// The API reference, rendered from the broker's own OpenAPI description. No file is loaded from
// another server.

import { html, useState } from "./vendor/htm-preact.js";
import { get } from "./api.js";
import { Badge, Card, Empty, Loaded, usePoll } from "./parts.js";

const METHODS = ["get", "head", "post", "put", "patch", "delete"];
const DEPTH_MAX = 6;

export function Api({ query }) {
  const [search, setSearch] = useState(query.get("q") || "");
  const state = usePoll((signal) => get("openapi.json", {}, signal), 0);
  return html`<header class="page-head"><h1>API reference</h1><div class="tools">
      <input type="search" data-search placeholder="Search  /" aria-label="Search the API" value=${search} onInput=${(e) => setSearch(e.target.value)} />
      <a class="quiet" href="../openapi.json">openapi.json</a></div></header>
    <${Loaded} state=${state}>${(said) => html`<${Reference} said=${said} search=${search.trim().toLowerCase()} />`}<//>`;
}

function Reference({ said, search }) {
  const tags = new Map((said.tags || []).map((tag) => [tag.name, { ...tag, found: [] }]));
  for (const [path, item] of Object.entries(said.paths)) {
    for (const method of METHODS.filter((each) => item[each])) {
      const operation = item[method];
      const words = `${method} ${path} ${operation.summary || ""}`.toLowerCase();
      if (!words.includes(search)) continue;
      const tag = operation.tags?.[0] || "other";
      if (!tags.has(tag)) tags.set(tag, { name: tag, found: [] });
      tags.get(tag).found.push({ method, path, operation });
    }
  }
  const shown = [...tags.values()].filter((tag) => tag.found.length);
  if (!shown.length) return html`<${Empty} title="Nothing found">No method, path or summary contains “${search}”.<//>`;
  return shown.map((tag) => html`<${Card} key=${tag.name} title=${tag.name} note=${coded(tag.description)} flush>
    ${tag.found.map((one) => html`<${Operation} key=${one.method + one.path} said=${said} one=${one} />`)}<//>`);
}

/** The content is rendered when it is opened: there are a hundred operations. */
function Operation({ said, one }) {
  const [isOpen, setOpen] = useState(false);
  const { method, path, operation } = one;
  return html`<details class="operation" onToggle=${(event) => setOpen(event.target.open)}>
    <summary><span class="method ${method}">${method.toUpperCase()}</span><code>${path}</code>
      <span class="muted">${operation.summary}</span></summary>
    ${isOpen && html`<div class="operation-body">
      ${paragraphs(operation.description)}
      <${Parameters} said=${said} all=${operation.parameters} />
      <${Bodies} said=${said} title="Body" content=${resolved(said, operation.requestBody)?.content} />
      <h3>Responses</h3>
      ${Object.entries(operation.responses || {}).map(([status, answer]) => html`<${Answer} key=${status} said=${said} status=${status} answer=${resolved(said, answer)} />`)}
    </div>`}
  </details>`;
}

const paragraphs = (text = "") => text.split(/\n\s*\n/).filter(Boolean).map((each, at) => html`<p key=${at}>${coded(each)}</p>`);

/** Render text between backticks as code. */
const coded = (text = "") => text.split("`").map((each, at) => (at % 2 ? html`<code key=${at}>${each}</code>` : each));

function Parameters({ said, all = [] }) {
  if (!all.length) return null;
  return html`<h3>Parameters</h3><table aria-label="Parameters"><tbody>
    ${all.map((each) => resolved(said, each)).map((each) => html`<tr key=${each.in + each.name}>
      <td><code>${each.name}</code>${each.required && html` <${Badge}>required<//>`}</td>
      <td class="muted">${each.in}</td><td><code>${JSON.stringify(sketch(said, each.schema))}</code></td>
      <td class="wide">${coded(each.description)}</td></tr>`)}
  </tbody></table>`;
}

function Answer({ said, status, answer }) {
  const kind = status < "300" ? "good" : "";
  return html`<div class="answer"><p><${Badge} kind=${kind}>${status}<//> ${coded(answer.description)}</p>
    <${Bodies} said=${said} content=${answer.content} /></div>`;
}

function Bodies({ said, title, content }) {
  const kinds = Object.entries(content || {});
  if (!kinds.length) return null;
  // Media types with the same shape share one listing of it.
  const shapes = new Map();
  for (const [kind, { schema, example }] of kinds) {
    const shape = JSON.stringify(example ?? sketch(said, schema), null, 2) ?? "";
    shapes.set(shape, [...(shapes.get(shape) || []), kind]);
  }
  return html`${title && html`<h3>${title}</h3>`}
    ${[...shapes].map(([shape, names]) => html`<div key=${names[0]}><p class="muted">${names.join(", ")}</p>
      ${shape && shape !== "{}" && html`<pre>${shape}</pre>`}</div>`)}`;
}

function resolved(said, node) {
  const name = node?.$ref;
  if (!name) return node;
  return name.replace(/^#\//, "").split("/").reduce((at, part) => at?.[part], said);
}

/** Build a sample value of the schema: its examples and defaults, else names of types. */
function sketch(said, node, depth = 0) {
  const schema = resolved(said, node) || {};
  if (depth > DEPTH_MAX) return "…";
  if (schema.examples?.length) return schema.examples[0];
  if (schema.const !== undefined) return schema.const;
  if (schema.enum) return schema.enum.join(" | ");
  const choices = schema.anyOf || schema.oneOf;
  if (choices) return sketch(said, choices.find((each) => each.type !== "null") || choices[0], depth);
  if (schema.allOf) return Object.assign({}, ...schema.allOf.map((each) => sketch(said, each, depth)));
  if (schema.type === "array") return [sketch(said, schema.items, depth + 1)];
  if (schema.properties) {
    return Object.fromEntries(Object.entries(schema.properties).map(([name, each]) => [name, sketch(said, each, depth + 1)]));
  }
  if (schema.type === "object" && typeof schema.additionalProperties === "object") {
    return { "…": sketch(said, schema.additionalProperties, depth + 1) };
  }
  return schema.default ?? ([schema.type].flat().filter(Boolean).join(" | ") || {});
}
