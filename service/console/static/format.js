// Formats of numbers, sizes, times and bytes.

const groups = new Intl.NumberFormat("en-US");

export function count(value) {
  return value == null ? "–" : groups.format(Math.round(value));
}

/** 1 segment, 2 segments. */
export function counted(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** Format a rate with three significant digits: more would change too fast to read. */
export function rate(value) {
  if (value == null) return "–";
  if (value === 0) return "0";
  if (value < 0.01) return "<0.01";
  if (value < 10) return value.toFixed(2).replace(/\.?0+$/, "");
  if (value < 100) return value.toFixed(1);
  return short(value);
}

export function short(value) {
  if (value == null) return "–";
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (Math.abs(value) >= size * 10 || (unit !== "k" && Math.abs(value) >= size)) {
      return `${(value / size).toPrecision(3)}${unit}`;
    }
  }
  return groups.format(Math.round(value));
}

export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toPrecision(3)} ${units[at]}`;
}

export function ms(value) {
  if (value == null) return "–";
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return `${(value / 1000).toPrecision(3)} s`;
}

export function duration(value) {
  if (value == null) return "–";
  const s = Math.max(value, 0) / 1000;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 60) return `${Math.round(s)} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return both(s, 3600, "h", 60, "min");
  return both(s, 86400, "d", 3600, "h");
}

function both(s, size, unit, smaller, smallerUnit) {
  const rest = Math.floor((s % size) / smaller);
  return `${Math.floor(s / size)} ${unit}${rest ? ` ${rest} ${smallerUnit}` : ""}`;
}

const pad = (n, width = 2) => String(n).padStart(width, "0");

/** Format local time in a form that sorts as text. */
export function time(value) {
  if (value == null) return "–";
  const d = new Date(value);
  if (Number.isNaN(d.getTime())) return String(value);
  const day = `${d.getFullYear()}-${pad(d.getMonth() + 1)}-${pad(d.getDate())}`;
  return `${day} ${pad(d.getHours())}:${pad(d.getMinutes())}:${pad(d.getSeconds())}.${pad(d.getMilliseconds(), 3)}`;
}

export function dollars(value) {
  if (value == null) return "–";
  return `$${value >= 1000 ? groups.format(Math.round(value)) : value.toFixed(2)}`;
}

/** Explain a config's value: a duration, a size, or no limit. */
export function configMeaning(name, value) {
  if (value === "-1" && name.startsWith("retention.")) return name.endsWith("ms") ? "unlimited" : "no limit";
  if (!/^\d+$/.test(value)) return "";
  if (name.endsWith(".ms")) return duration(Number(value));
  if (name.endsWith(".bytes")) return bytes(Number(value));
  return "";
}

// -- bytes of records

export function fromBase64(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i += 1) out[i] = raw.charCodeAt(i);
  return out;
}

export function toBase64(data) {
  let raw = "";
  for (const byte of data) raw += String.fromCharCode(byte);
  return btoa(raw);
}

const utf8 = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });

const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f]/;

/** Decode bytes as null, JSON or text; else as binary. `text` is always the stored text. */
export function decode(base64) {
  if (base64 == null) return { kind: "null", text: "null", size: 0, data: new Uint8Array() };
  const data = fromBase64(base64);
  let text;
  try {
    text = utf8.decode(data);
  } catch {
    return { kind: "binary", text: spaced(data.subarray(0, 64)), size: data.length, data };
  }
  if (CONTROL.test(text)) return { kind: "binary", text: spaced(data.subarray(0, 64)), size: data.length, data };
  try {
    JSON.parse(text);
    return { kind: "json", text, size: data.length, data };
  } catch {
    return { kind: "text", text, size: data.length, data };
  }
}

const INDENT_MAX = 40;

/**
 * Break the text of a JSON value into indented lines. Only white space between tokens changes:
 * numbers, repeated names and the order of names stay as they are. Works at any depth.
 */
export function indented(text, by = "  ") {
  const token = /"(?:[^"\\]|\\.)*"|[[\]{},:]|[^\s[\]{},:"]+/g;
  const out = [];
  let depth = 0;
  let last = "";
  const line = () => `\n${by.repeat(Math.min(depth, INDENT_MAX))}`;
  for (const [one] of text.matchAll(token)) {
    if (one === "}" || one === "]") {
      depth -= 1;
      if (last !== "{" && last !== "[") out.push(line());
    } else if (last === "{" || last === "[" || last === ",") {
      out.push(line());
    }
    if (one === "{" || one === "[") depth += 1;
    out.push(one === ":" ? ": " : one);
    last = one;
  }
  return out.join("");
}

/** Return bytes as hex digits, two for each byte. */
export const hex = (data) => spaced(data).replaceAll(" ", "");

const spaced = (data) => [...data].map((b) => b.toString(16).padStart(2, "0")).join(" ");

/** Bytes that a hex dump shows at first. */
export const HEX_MAX = 8192;

/** Format like hexdump: offset, bytes, printable characters. */
export function hexDump(data, rowsMax = HEX_MAX / 16) {
  const rows = [];
  for (let at = 0; at < data.length && rows.length < rowsMax; at += 16) {
    const row = data.subarray(at, at + 16);
    const shown = [...row].map((b) => (b >= 32 && b < 127 ? String.fromCharCode(b) : "."));
    rows.push(`${at.toString(16).padStart(8, "0")}  ${spaced(row).padEnd(47)}  ${shown.join("")}`);
  }
  return rows.join("\n");
}
