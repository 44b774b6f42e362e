"use strict";
// two elements that gradio has no component for: videos in step with their measures, and a map of
// cells to choose from. They start when they are put into the page and need nothing else.

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

// one video of four panels (dense, sparse / difference, difference times `bright`) is drawn onto
// canvases: a single decoder cannot get out of step with itself.
class Viewer extends HTMLElement {
  connectedCallback() {
    if (this.video) return;
    const { frames, fps, width, height, bright } = this.dataset;
    Object.assign(this, { frames: Number(frames), fps: Number(fps), bright: Number(bright) });
    this.width = Number(width);
    this.height = Number(height);
    const stage = this.querySelector(".stage");
    const [dense, sparse, plain] = stage.querySelectorAll("canvas");
    const amplified = document.createElement("canvas");
    amplified.className = "amplified";
    amplified.setAttribute("aria-hidden", "true");
    const stack = document.createElement("div");
    stack.className = "stack";
    plain.replaceWith(stack);
    stack.append(plain, amplified);
    this.panels = [[dense, 0, 0], [sparse, 1, 0], [plain, 0, 1], [amplified, 1, 1]];
    for (const [canvas] of this.panels) {
      canvas.width = this.width;
      canvas.height = this.height;
    }
    this.plots = [...this.querySelectorAll(".vs-plot")].map((plot) => ({
      area: plot.querySelector(".area"),
      cursor: plot.querySelector(".cursor"),
      value: plot.querySelector(".value"),
      labels: JSON.parse(plot.dataset.labels),
    }));
    this.play = this.querySelector(".play");
    this.seek = this.querySelector(".seek");
    this.counter = this.querySelector(".counter");
    this.frame = 0;

    const video = (this.video = document.createElement("video"));
    Object.assign(video, { muted: true, loop: true, playsInline: true, preload: "auto" });
    video.addEventListener("seeked", () => this.draw());
    video.addEventListener("loadeddata", () => {
      this.draw();
      this.dataset.ready = "";
      if (!calm && this.stopped === undefined) video.play().catch(() => {});
    });
    video.addEventListener("error", () => { this.counter.textContent = "the video cannot be played"; });
    video.addEventListener("play", () => { this.play.textContent = "Pause"; this.follow(); });
    video.addEventListener("pause", () => { this.play.textContent = "Play"; });
    video.src = new URL(this.dataset.src, document.baseURI).href;

    this.play.addEventListener("click", () => {
      this.stopped = !video.paused;
      if (video.paused) video.play(); else video.pause();
    });
    this.seek.addEventListener("input", () => this.goTo(Number(this.seek.value)));
    // Home on the first frame is no input, and yet a hand on the slider: playing on, the video
    // would move the slider away under it.
    this.seek.addEventListener("pointerdown", () => this.goTo(this.frame));
    this.seek.addEventListener("keydown", ({ key }) => {
      if (/^(Arrow|Page|Home|End)/.test(key)) this.goTo(this.frame);
    });
    const slider = this.querySelector(".times-slider");
    slider.addEventListener("input", () => this.amplify(Number(slider.value)));
    this.amplify(Number(slider.value));
    for (const { area } of this.plots) {
      const at = (event) => {
        const box = area.getBoundingClientRect();
        const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
        this.goTo(Math.round(share * (this.frames - 1)));
      };
      area.addEventListener("pointerdown", (event) => { area.setPointerCapture(event.pointerId); at(event); });
      area.addEventListener("pointermove", (event) => { if (event.buttons) at(event); });
    }
    // what nobody sees does not play.
    this.watcher = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) video.pause();
      else if (!calm && !this.stopped) video.play().catch(() => {});
    });
    this.watcher.observe(stage);
    this.mark(0);
  }

  disconnectedCallback() {
    this.watcher.disconnect();
    this.video.pause();
    this.video.removeAttribute("src");
    this.video.load();
  }

  // the plain difference times the gain, and where that is brighter the panel in which small
  // differences survived the encoder.
  amplify(gain) {
    this.panels[2][0].style.filter = `brightness(${gain})`;
    this.panels[3][0].style.filter = `brightness(${gain / this.bright})`;
    for (const text of this.querySelectorAll(".times")) text.textContent = `× ${gain}`;
    this.dataset.gain = gain;
  }

  goTo(frame) {
    this.stopped = true;
    this.video.pause();
    this.video.currentTime = (frame + 0.5) / this.fps;
    this.mark(frame);
  }

  follow() {
    this.mark(Math.min(this.frames - 1, Math.max(0, Math.floor(this.video.currentTime * this.fps + 0.01))));
    this.draw();
    if (!this.video.paused) requestAnimationFrame(() => this.follow());
  }

  draw() {
    const { width, height } = this;
    for (const [canvas, column, row] of this.panels) {
      canvas.getContext("2d").drawImage(
        this.video, column * width, row * height, width, height, 0, 0, width, height);
    }
  }

  mark(frame) {
    this.frame = frame;
    this.seek.value = frame;
    this.counter.textContent = `frame ${frame + 1} / ${this.frames}`;
    for (const plot of this.plots) {
      plot.cursor.style.left = `${this.frames > 1 ? (100 * frame) / (this.frames - 1) : 0}%`;
      plot.value.textContent = plot.labels[frame];
    }
  }
}

// density of steps x layers: a click or the arrow keys choose a cell, and its heads show below.
class Heat extends HTMLElement {
  connectedCallback() {
    if (this.heads) return;
    this.heads = JSON.parse(this.dataset.heads);
    this.svg = this.querySelector("svg");
    this.mark = this.querySelector(".mark");
    this.cells = new Map();
    for (const rect of this.svg.querySelectorAll("rect[data-step]")) {
      this.cells.set(`${rect.dataset.step},${rect.dataset.layer}`, rect);
    }
    const choose = (rect) => this.choose(Number(rect.dataset.step), Number(rect.dataset.layer));
    this.svg.addEventListener("click", (event) => {
      const rect = event.target.closest("rect[data-step]");
      if (rect) choose(rect);
    });
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    this.svg.addEventListener("keydown", (event) => {
      const move = moves[event.key];
      if (!move && event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      const [step, layer] = this.chosen ?? [0, 0];
      const next = move && this.chosen ? [step + move[0], layer + move[1]] : [step, layer];
      if (this.cells.has(next.join(","))) this.choose(...next);
    });
  }

  choose(step, layer) {
    this.chosen = [step, layer];
    this.mark.removeAttribute("hidden");
    this.mark.setAttribute("x", step);
    this.mark.setAttribute("y", layer);
    const box = this.querySelector(".heads");
    const heading = document.createElement("p");
    heading.className = "chosen";
    heading.textContent = this.cells.get(`${step},${layer}`).dataset.label;
    box.replaceChildren(heading);
    const shares = this.heads[step]?.[layer];
    for (const [head, share] of (shares ?? []).entries()) {
      const row = document.createElement("div");
      row.className = "head";
      const name = document.createElement("span");
      name.textContent = `head ${head + 1}`;
      const bar = document.createElement("i");
      bar.style.setProperty("--share", share);
      const value = document.createElement("b");
      value.textContent = `${(share * 100).toFixed(1)} %`;
      row.append(name, bar, value);
      box.append(row);
    }
    this.dispatchEvent(new CustomEvent("vs-cell", { bubbles: true }));
  }
}

// where the buttons stay in reach at the bottom, what they start shows further down.
document.addEventListener("click", (event) => {
  if (!event.target.closest(".vs-run button.primary") || !matchMedia("(max-width: 700px)").matches) return;
  document.querySelector("#tabs").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
});

// a dropdown of gradio's that Tab leads away from leaves its list open, and stumbles over it when the
// choices change; Escape closes it.
document.addEventListener("focusout", ({ target }) => {
  if (target.getAttribute("role") !== "combobox") return;
  const escape = new KeyboardEvent("keydown", { key: "Escape", bubbles: true });
  setTimeout(() => target.dispatchEvent(escape));
});

customElements.define("vs-viewer", Viewer);
customElements.define("vs-heat", Heat);
