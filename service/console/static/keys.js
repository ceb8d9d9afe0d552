// Keyboard shortcuts: g and a letter opens a page, / focuses the search, n creates, j and k move
// between rows.

import { html, useEffect, useRef } from "./vendor/htm-preact.js";

const isTyping = (target) => /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable;

export function Shortcuts({ pages, helps, setHelps }) {
  const dialog = useRef();
  useEffect(() => {
    let pending = 0;
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const open = document.querySelector("dialog[open]");
      if (event.key === "Escape" && isTyping(event.target) && !open) event.target.blur();
      if (open || isTyping(event.target)) return;
      const page = pages.find((one) => one[2] === event.key);
      if (page && Date.now() - pending < 1200) {
        location.hash = `#/${page[0]}`;
        pending = 0;
        return;
      }
      pending = event.key === "g" ? Date.now() : 0;
      if (event.key === "?") setHelps(true);
      const wanted = { "/": "[data-search]", n: "[data-new]" }[event.key];
      const found = wanted && document.querySelector(wanted);
      if (found) {
        event.preventDefault();
        if (event.key === "/") found.focus();
        else found.click();
      }
      if (event.key === "j" || event.key === "k") walk(event.key === "j" ? 1 : -1);
      if (event.key === "Enter") document.querySelector("tr.at")?.click();
    };
    document.addEventListener("keydown", pressed);
    return () => document.removeEventListener("keydown", pressed);
  }, []);
  useEffect(() => {
    if (helps) dialog.current.showModal();
  }, [helps]);
  return helps && html`<dialog ref=${dialog} onClose=${() => setHelps(false)} aria-label="Keys">
    <form method="dialog"><header><h2>Keys</h2><button class="quiet" aria-label="Close">✕</button></header>
    <div class="dialog-body"><dl class="keys">
      ${pages.map(([id, name, key]) => html`<dt key=${id}><kbd>g</kbd> <kbd>${key}</kbd></dt><dd>${name}</dd>`)}
      <dt><kbd>/</kbd></dt><dd>Search</dd>
      <dt><kbd>n</kbd></dt><dd>New topic, or new record in the open topic</dd>
      <dt><kbd>j</kbd> <kbd>k</kbd> <kbd>Enter</kbd></dt><dd>Down, up, open a row</dd>
      <dt><kbd>Esc</kbd></dt><dd>Close, or leave a field</dd>
    </dl></div></form>
  </dialog>`;
}

function walk(by) {
  const rows = [...document.querySelectorAll("tr.opens")];
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.classList.contains("at"));
  rows[now]?.classList.remove("at");
  const next = rows[Math.min(Math.max(now + by, 0), rows.length - 1)];
  next.classList.add("at");
  next.scrollIntoView({ block: "nearest" });
}
