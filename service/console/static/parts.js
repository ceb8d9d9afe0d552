// Components that all pages share. User data is only ever a text node or an attribute's value: no
// code of the console makes markup of a string.

import { html, useEffect, useErrorBoundary, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { duration, time } from "./format.js";

/** Calls `load` periodically while the page is visible. Keeps the last result after an error. */
export function usePoll(load, everyMs, deps = []) {
  const [state, setState] = useState({ data: null, error: null, at: 0 });
  const again = useRef(() => {});
  useEffect(() => {
    const gone = new AbortController();
    let timer = 0;
    setState((was) => (was.data === null ? was : { data: null, error: null, at: 0 }));
    const run = async () => {
      clearTimeout(timer);
      if (!document.hidden) {
        try {
          const data = await load(gone.signal);
          if (gone.signal.aborted) return;
          setState({ data, error: null, at: Date.now() });
        } catch (error) {
          if (gone.signal.aborted) return;
          setState((was) => ({ ...was, error }));
        }
      }
      if (everyMs) timer = setTimeout(run, everyMs);
    };
    again.current = run;
    const seen = () => document.hidden || run();
    document.addEventListener("visibilitychange", seen);
    window.addEventListener("tidelog-again", run);
    run();
    return () => {
      gone.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", seen);
      window.removeEventListener("tidelog-again", run);
    };
  }, deps);
  return { ...state, everyMs, again: () => again.current() };
}

/** Polls without an answer, after which the page shows the age of its data. */
const MISSED = 2.5;

/** Return the age of the data in ms if polls are missing, else 0. */
function useAge({ at, everyMs }) {
  const age = () => (everyMs && at && Date.now() - at > MISSED * everyMs ? Date.now() - at : 0);
  const [, redraw] = useState(0);
  const shown = age();
  useEffect(() => {
    const timer = setInterval(() => (age() || shown) && redraw((n) => n + 1), 1000);
    return () => clearInterval(timer);
  }, [at, everyMs, shown > 0]);
  return shown;
}

/** Shows a page's content: placeholders until it is loaded, and an error above the last result. */
export function Loaded({ state, children, rows = 6 }) {
  const age = useAge(state);
  if (state.data !== null) {
    return html`${state.error && html`<${Problem} error=${state.error} stale />`}
      ${age > 0 && html`<p class="warn-text age" role="status">As of ${time(state.at).slice(11, 19)}, ${duration(age)} old.</p>`}
      <div class=${age > 0 ? "loaded stale" : "loaded"}>${children(state.data)}</div>`;
  }
  if (state.error) return html`<${Problem} error=${state.error} again=${state.again} />`;
  return html`<div class="bones" aria-busy="true" aria-label="Loading">
    ${Array.from({ length: rows }, (_, n) => html`<div class="bone" key=${n}></div>`)}
  </div>`;
}

export function Problem({ error, stale = false, again }) {
  return html`<div class="problem" role="alert">
    <strong>${error.status === 404 ? "Not found" : "Request failed"}</strong>
    <span>${error.message}${stale ? " The data below is not current." : ""}</span>
    ${again && html`<button type="button" onClick=${again}>Retry</button>`}
  </div>`;
}

/** Contains an error to its children: the rest of the page stays usable. A new key clears it. */
export function Guard({ what, children }) {
  const [error] = useErrorBoundary((problem) => console.error(problem));
  return error ? html`<${Problem} error=${{ message: `The console cannot show this ${what}: ${error.message}` }} />` : children;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><strong>${title}</strong><p>${children}</p></div>`;
}

export function Stat({ name, value, unit, note, title }) {
  return html`<div class="stat" title=${title}>
    <span class="stat-name">${name}</span>
    <span class="stat-value">${value}${unit && html`<small>${unit}</small>`}</span>
    <span class="stat-note">${note || "\u00a0"}</span>
  </div>`;
}

export function Card({ title, note, actions, children, flush = false }) {
  return html`<section class="card">
    ${title && html`<header class="card-head"><h2>${title}</h2>${note && html`<span class="muted">${note}</span>`}
      ${actions && html`<div class="actions">${actions}</div>`}</header>`}
    <div class=${flush ? "card-body flush" : "card-body"}>${children}</div>
  </section>`;
}

/** Maximum number of rows: more rows are too many to read, and too slow to draw every few seconds. */
const ROWS_MAX = 500;

/**
 * A table: a click on a column's head sorts it, a click or Enter opens a row. A column: {name,
 * of(row) -> sortable, show(row) -> node, right, low (hidden on a phone)}.
 */
export function Table({ columns, rows, id, href, sorted, label }) {
  const more = rows.length - ROWS_MAX;
  const [order, setOrder] = useState(sorted || { by: 0, down: false });
  const key = columns[order.by]?.of;
  const shown = key ? [...rows].sort((a, b) => compare(key(a), key(b)) * (order.down ? -1 : 1)) : rows;
  const sort = (by) => setOrder({ by, down: order.by === by ? !order.down : Boolean(columns[by].right) });
  const open = (row) => href && (location.hash = href(row));
  return html`<div class="scroll"><table aria-label=${label}>
    <thead><tr>${columns.map((column, at) => html`<th key=${column.name} scope="col" class=${classes(column)}
      aria-sort=${order.by === at ? (order.down ? "descending" : "ascending") : undefined}>
      ${column.of ? html`<button type="button" onClick=${() => sort(at)}>${column.name}</button>` : column.name}
    </th>`)}</tr></thead>
    <tbody>${shown.slice(0, ROWS_MAX).map((row) => html`<tr key=${id(row)} class=${href ? "opens" : ""}
      onClick=${(event) => event.target.closest("a, button") || open(row)}>
      ${columns.map((column) => html`<td key=${column.name} class=${classes(column)}>${column.show(row)}</td>`)}
    </tr>`)}</tbody>
    ${more > 0 && html`<tfoot><tr><td colspan=${columns.length}>and ${more} more: sort or search</td></tr></tfoot>`}
  </table></div>`;
}

const classes = (column) => `${column.right ? "right " : ""}${column.low ? "low" : ""}`;

function compare(a, b) {
  if (typeof a === "string") return a.localeCompare(b, "en", { numeric: true });
  return (a ?? -Infinity) - (b ?? -Infinity);
}

/**
 * A modal dialog. It shows an error that `onSubmit` throws. A click outside does not close it, and
 * Escape does so only while nothing is typed. With `keeps`, only its buttons close it. With
 * `byCtrlEnter`, Enter alone does not submit.
 */
export function Dialog({ title, onClose, onSubmit, submit = "Save", danger = false, ready = true, wide = false, keeps = false, byCtrlEnter = false, children }) {
  const held = useRef();
  const typed = useRef(keeps);
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  useLayoutEffect(() => {
    held.current.showModal();
    held.current.querySelector("[data-first]")?.focus();
  }, []);
  const act = async (event) => {
    event.preventDefault();
    if (!ready || busy) return;
    setBusy(true);
    setError(null);
    try {
      await onSubmit();
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  const pressed = (event) => {
    if (event.key === "Escape" && typed.current) event.preventDefault();
    if (event.key !== "Enter") return;
    const isCtrl = event.ctrlKey || event.metaKey;
    if (isCtrl || (byCtrlEnter && event.target.tagName === "INPUT")) event.preventDefault();
    if (isCtrl) event.currentTarget.querySelector("form").requestSubmit();
  };
  return html`<dialog ref=${held} class=${wide ? "wide" : ""} onClose=${onClose} onKeyDown=${pressed}
      onCancel=${(event) => typed.current && event.preventDefault()} aria-label=${title}>
    <form onSubmit=${act} onInput=${() => { typed.current = true; }}>
      <header><h2>${title}</h2>
        <button type="button" class="quiet" aria-label="Close" onClick=${() => held.current.close()}>✕</button></header>
      <div class="dialog-body">${children}${error && html`<${Problem} error=${error} />`}</div>
      <footer>${!keeps && html`<button type="button" onClick=${() => held.current.close()}>Cancel</button>`}
        <button type="submit" class=${danger ? "danger" : "primary"} disabled=${!ready || busy}>${busy ? "Working…" : submit}</button>
      </footer>
    </form>
  </dialog>`;
}

/** Confirms an action that cannot be undone: the user types the object's name. */
export function TypedConfirmation({ title, name, what, onClose, onSubmit, submit = "Delete" }) {
  const [typed, setTyped] = useState("");
  return html`<${Dialog} title=${title} danger submit=${submit} ready=${typed === name} onClose=${onClose} onSubmit=${onSubmit}>
    <p>${what}</p>
    <${Field} label=${html`Type <code>${name}</code> to confirm`}>
      <input data-first autocomplete="off" spellcheck=${false} value=${typed} onInput=${(e) => setTyped(e.target.value)} />
    <//>
  <//>`;
}

export function Field({ label, note, children }) {
  return html`<label class="field"><span class="field-name">${label}</span>${children}${note && html`<span class="muted">${note}</span>`}</label>`;
}

export function Choice({ value, options, onChange, label }) {
  return html`<div class="choice" role="group" aria-label=${label}>
    ${options.map(([key, name]) => html`<button type="button" key=${key} aria-pressed=${value === key}
      onClick=${() => onChange(key)}>${name}</button>`)}
  </div>`;
}

export function Badge({ kind = "", children }) {
  return html`<span class="badge ${kind}">${children}</span>`;
}

// -- short messages

let listener = () => {};

export function say(text, kind = "good") {
  listener({ text, kind, at: Date.now() + Math.random() });
}

export function Messages() {
  const [held, setHeld] = useState([]);
  listener = (message) => {
    setHeld((was) => [...was.slice(-2), message]);
    setTimeout(() => setHeld((was) => was.filter((one) => one !== message)), 5000);
  };
  return html`<div class="messages" role="status" aria-live="polite">
    ${held.map((one) => html`<div key=${one.at} class="message ${one.kind}">${one.text}</div>`)}
  </div>`;
}
