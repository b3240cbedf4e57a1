/* What a page does without a kernel: it shows the frame of a widget that the reader chooses, and the planner's bars. */
"use strict";

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

let widgets = 0;

/* One select per option. Calls `changed` with the chosen values at once, and after each change. */
function selects(widget, options, given, changed) {
  const row = element("div", { class: "widget-row" });
  const chosen = { ...given };
  for (const [name, values] of Object.entries(options)) {
    const id = `widget-${widgets}-${name}`;
    const select = element("select", { id }, ...values.map((value) => element("option", { value }, value)));
    select.value = given[name];
    select.addEventListener("change", () => {
      chosen[name] = select.value;
      changed(chosen);
    });
    row.append(element("span", { class: "widget-option" }, element("label", { for: id }, name), select));
  }
  widget.append(row);
  changed(chosen);
}

/* Opening one of the outputs and texts that answer a prediction opens them all, up to the next prediction. */
function openAnswersTogether() {
  let group = [];
  for (const found of document.querySelectorAll(".bd-article p > strong, .bd-article details.answer")) {
    if (found.tagName === "STRONG") {
      if (found.textContent === "Predict.") group = [];
      continue;
    }
    const together = group;
    together.push(found);
    found.addEventListener("toggle", () => together.forEach((other) => (other.open ||= found.open)));
  }
}

const FRAME_SCALE = 1.5; // A frame has this many pixels for each pixel of the page.

function frame() {
  const image = element("img", { class: "widget-frame", alt: "" });
  image.addEventListener("load", () => (image.width = image.naturalWidth / FRAME_SCALE));
  return image;
}

function show(image, data, chosen) {
  const indices = Object.entries(data.options).map(([name, values]) => values.indexOf(chosen[name]));
  image.src = `${data.frames}${indices.join("-")}.png`;
  image.alt = "Figure for " + Object.entries(chosen).map(([name, value]) => `${name}: ${value}`).join(", ");
}

function choices(widget, data) {
  const image = frame();
  selects(widget, data.options, data.given, (chosen) => show(image, data, chosen));
  widget.append(image);
  if (data.note) widget.append(element("p", { class: "widget-note" }, data.note));
}

function stepper(widget, data) {
  const [[name, values]] = Object.entries(data.options);
  const last = values.length - 1;
  const slider = element("input", { type: "range", min: 0, max: last, value: 0, "aria-label": name });
  const text = element("output", { class: "widget-step" });
  const image = frame();
  let timer = 0;
  const go = (index) => {
    slider.value = Math.max(0, Math.min(last, index));
    text.textContent = `${name} ${values[slider.value]} of ${values[last]}`;
    show(image, data, { [name]: values[slider.value] });
    back.disabled = Number(slider.value) === 0;
    on.disabled = Number(slider.value) === last;
  };
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ Play";
  };
  const button = (label, action) => {
    const made = element("button", { type: "button" }, label);
    made.addEventListener("click", action);
    return made;
  };
  const move = (by) => () => {
    stop();
    go(Number(slider.value) + by);
  };
  const back = button("← Back", move(-1));
  const on = button("Next →", move(1));
  const play = button("▶ Play", () => {
    if (timer) return stop();
    if (Number(slider.value) === last) go(0);
    play.textContent = "■ Stop";
    timer = setInterval(() => {
      go(Number(slider.value) + 1);
      if (Number(slider.value) === last) stop();
    }, 1200);
  });
  slider.addEventListener("input", () => {
    stop();
    go(Number(slider.value));
  });
  widget.append(element("div", { class: "widget-row" }, play, back, on, slider, text), image);
  for (const value of values.keys()) new Image().src = `${data.frames}${value}.png`; // so that no step has to wait
  go(0);
}

function planner(widget, data) {
  const names = Object.keys(data.parts);
  const edge = 1.33 * Math.max(...data.gpus);
  const chart = element("div", { class: "planner" });
  const rounded = (gb) => (gb < 10 ? gb.toPrecision(2) : Math.round(gb).toLocaleString("en")) + " GB";
  const draw = (chosen) => {
    const at = (table, ...names) =>
      names.reduce((found, name) => found[data.options[name].indexOf(chosen[name])], table);
    const activations = at(data.activations, "model", "precision", "micro-batch", "checkpointing", "attention");
    chart.replaceChildren();
    for (const [index, stage] of data.stages.entries()) {
      const held = [...at(data.state, "model", "ranks", "precision")[index], activations];
      const total = held.reduce((sum, part) => sum + part, 0);
      const bar = element("div", { class: "planner-bar" });
      held.forEach((gb, index) => {
        const style = `width:${(100 * gb) / Math.max(edge, total)}%;background:${data.parts[names[index]]}`;
        if (gb > 0) bar.append(element("span", { style, title: `${names[index]}: ${rounded(gb)}` }));
      });
      const lines = data.gpus.filter((gb) => gb < Math.max(edge, total));
      for (const gb of lines) bar.append(element("i", { style: `left:${(100 * gb) / Math.max(edge, total)}%` }));
      const fits = data.gpus.find((gb) => total <= gb);
      const verdict = `${rounded(total)}, ${fits ? `fits ${fits} GB` : "fits no GPU"}`;
      const parts = held.map((gb, index) => `${names[index]} ${rounded(gb)}`).join(", ");
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", `${stage}: ${verdict} (${parts})`);
      chart.append(element("span", { class: "planner-stage" }, stage), bar, element("span", {}, verdict));
    }
  };
  selects(widget, data.options, data.given, draw);
  const key = element("p", { class: "widget-note" });
  for (const name of names) {
    const sample = element("span", { class: "planner-key", style: `background:${data.parts[name]}` });
    key.append(element("span", { class: "widget-pair" }, sample, name));
  }
  const lines = `All numbers are for one rank. The dashed lines are the memory of GPUs: ${data.gpus.join(", ")} GB.`;
  widget.append(chart, key, element("p", { class: "widget-note" }, lines));
}

openAnswersTogether();

const KINDS = { choices, stepper, planner };

for (const widget of document.querySelectorAll(".course-widget")) {
  widgets += 1;
  const data = JSON.parse(widget.querySelector("script").textContent);
  KINDS[data.kind](widget, data);
  // The stored figure shows the same without a script.
  const output = widget.closest(".output");
  for (let next = output.nextElementSibling; next; next = next.nextElementSibling) next.hidden = true;
}
