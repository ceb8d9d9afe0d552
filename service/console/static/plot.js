// Line charts over time, with uPlot. A plot reads the theme's colours when it is made.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

const HEIGHT = 180;
/** Tick increments of an axis of bytes. */
const TWOS = Array.from({ length: 48 }, (_, n) => 2 ** n);
const sync = () => window.uPlot.sync("tidelog");

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** A counter that changes with the theme. */
export function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((n) => n + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", changed);
    window.addEventListener("tidelog-theme", changed);
    return () => {
      system.removeEventListener("change", changed);
      window.removeEventListener("tidelog-theme", changed);
    };
  }, []);
  return theme;
}

/** A line chart. `series`: [{name, values, colour (the name of a CSS variable)}]; `atMs`: their
   times; `show` formats a value. */
export function Plot({ label, atMs, series, show, binary = false }) {
  const box = useRef();
  const plot = useRef(null);
  const theme = useTheme();
  const names = series.map((one) => one.name).join("|");
  useEffect(() => {
    const axis = {
      stroke: colour("--muted"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: `11px ${colour("--font")}`,
    };
    const made = new window.uPlot({
      width: box.current.clientWidth,
      height: HEIGHT,
      padding: [8, 30, 0, 0],
      cursor: { y: false, sync: { key: sync().key }, points: { size: 6 } },
      legend: { live: true },
      hooks: { setCursor: [latest] },
      scales: { x: { time: true }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, size: 26, space: 70, values: (_, ticks) => ticks.map(clock) },
        { ...axis, size: 62, incrs: binary ? TWOS : undefined, values: (_, ticks) => ticks.map((tick) => show(tick)) },
      ],
      series: [
        { label: "time", value: (_, at) => (at == null ? "–" : clock(at)) },
        ...series.map((one) => ({
          label: one.name,
          stroke: colour(one.colour),
          width: 1.75,
          points: { show: false },
          value: (_, value) => (value == null ? "–" : show(value)),
        })),
      ],
    }, data(atMs, series), box.current);
    plot.current = made;
    const seen = new ResizeObserver(() => made.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    seen.observe(box.current);
    return () => {
      seen.disconnect();
      made.destroy();
    };
  }, [theme, names]);
  useEffect(() => {
    plot.current?.setData(data(atMs, series));
  }, [atMs, series]);
  return html`<figure class="plot" aria-label=${label}><div ref=${box}></div></figure>`;
}

/** Show the newest values in the legend while no cursor selects others. */
function latest(plot) {
  if (plot.cursor.left == null || plot.cursor.left < 0) plot.setLegend({ idx: plot.data[0].length - 1 }, false);
}

const data = (atMs, series) => [atMs.map((at) => at / 1000), ...series.map((one) => one.values)];

function clock(at) {
  return new Date(at * 1000).toTimeString().slice(0, 8);
}
