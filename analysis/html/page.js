"use strict";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const plots = JSON.parse(document.getElementById("plots").textContent);
const touch = matchMedia("(pointer: coarse)").matches;

// Sorting: the heading's button turns the order round; cells without a value stay at the end.
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.querySelectorAll("thead th")];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const numeric = head.classList.contains("n");
    const before = head.getAttribute("aria-sort");
    const down = before === "none" ? numeric : before === "ascending";
    heads.forEach((other) => other.setAttribute("aria-sort", other === head ? (down ? "descending" : "ascending") : "none"));
    const body = table.tBodies[0];
    const key = (row) => row.cells[column].dataset.key;
    const compare = (a, b) => numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
    const rows = [...body.rows].sort((one, other) => {
      const a = key(one), b = key(other);
      if (a === "" || b === "") return (a === "") - (b === "");
      return down ? compare(b, a) : compare(a, b);
    });
    body.append(...rows);
  }));
}

// The numbers of a plot, written out when they are asked for.
const cell = (kind, value) => {
  const made = document.createElement(kind);
  made.textContent = value === null ? "–" : typeof value === "number" ? Number(value.toPrecision(6)).toString() : value;
  if (typeof value === "number") made.className = "n";
  return made;
};
for (const details of document.querySelectorAll("details[data-plot]")) {
  details.addEventListener("toggle", () => {
    const holder = details.querySelector(".wide");
    if (!details.open || holder.firstChild) return;
    const { header, rows } = plots[details.dataset.plot];
    const table = holder.appendChild(document.createElement("table"));
    const head = table.createTHead().insertRow();
    head.append(...header.map((name) => cell("th", name)));
    const body = table.createTBody();
    for (const row of rows) body.insertRow().append(...row.map((value) => cell("td", value)));
  });
}

function coloured(form) {
  const ink = colour("--ink"), soft = colour("--soft"), grid = colour("--grid");
  const ways = Array.from({ length: 10 }, (_, at) => colour(`--c${at}`));
  const given = new Map();  // what has one name has one colour
  const data = form.data.map((trace) => {
    if (trace.meta === "heat") return { ...trace, colorbar: { ...trace.colorbar, tickfont: { color: ink } } };
    const fixed = { bound: ink, points: soft, mark: ways[1] }[trace.meta];
    if (!fixed && !given.has(trace.name)) given.set(trace.name, ways[given.size % ways.length]);
    const own = fixed ?? given.get(trace.name);
    return { ...trace, line: { width: 2, ...trace.line, color: own }, marker: { ...trace.marker, color: own },
             ...(trace.error_x && { error_x: { ...trace.error_x, color: ink } }) };
  });
  const axis = (given) => ({ gridcolor: grid, linecolor: soft, zerolinecolor: soft, ...given });
  const heat = form.data[0].meta === "heat";
  const layout = {
    ...form.layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 13 },
    margin: { l: 10, r: 10, t: 10, b: 10 }, xaxis: axis(form.layout.xaxis), yaxis: axis(form.layout.yaxis),
    legend: { ...form.layout.legend, orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, dragmode: touch ? false : "zoom",
    hoverlabel: { bgcolor: colour("--panel"), bordercolor: soft, font: { color: ink }, align: "left" },
  };
  if (innerWidth < 600 && !heat) layout.height += 20 * form.data.length;
  if (heat && innerWidth < 600) {  // the scale's room is below, where there is width for it; long names need the title's
    if (form.data[0].y.some((name) => name.length > 8)) layout.yaxis = { ...layout.yaxis, title: undefined };
    data[0].colorbar = { ...data[0].colorbar, orientation: "h", x: 0.5, y: 1.02, yanchor: "bottom",
                         title: { ...data[0].colorbar.title, side: "top" } };
  }
  return { data, layout };
}

function draw() {
  for (const [name, { form }] of Object.entries(plots)) {
    const { data, layout } = coloured(form);
    Plotly.react(name, data, layout, { responsive: true, displayModeBar: false, scrollZoom: false });
  }
}

// Zoom by buttons, for keyboards and fingers: about the middle of what is shown.
function zoom(plot, factor) {
  const change = {};
  for (const axis of ["xaxis", "yaxis"]) {
    const { range, type } = plot._fullLayout[axis];
    if (axis === "yaxis" && type === "category" && plot.data[0].meta !== "heat") continue;
    const middle = (range[0] + range[1]) / 2, half = (range[1] - range[0]) / 2 * factor;
    change[`${axis}.range`] = [middle - half, middle + half];
  }
  Plotly.relayout(plot, change);
}
function whole(plot) {
  const form = plots[plot.id].form.layout;
  Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": form.yaxis.autorange ?? true });
}
for (const button of document.querySelectorAll("button[data-zoom]")) {
  button.addEventListener("click", () => {
    const plot = document.getElementById(button.dataset.plot);
    const does = { in: () => zoom(plot, 0.7), out: () => zoom(plot, 1 / 0.7), whole: () => whole(plot),
                   save: () => Plotly.downloadImage(plot, { format: "png", scale: 2, filename: plot.id }) };
    does[button.dataset.zoom]();
  });
}

// The library is packed, which makes the page less than half as heavy.
async function unpacked(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
async function start() {
  if (!Object.keys(plots).length) return;
  const script = document.createElement("script");
  script.textContent = await unpacked("library");
  document.head.append(script);
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  document.documentElement.dataset.drawn = "yes";
}
start().catch((wrong) => {
  console.error(wrong);
  for (const plot of document.querySelectorAll(".plot")) plot.textContent = "This browser cannot draw the plots; their numbers are below.";
});
