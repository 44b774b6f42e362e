"use strict";
// two elements that gradio has no component for: videos in step with their measures, and a map of
// cells to choose from. They start when they are put into the page and need nothing else.
// One file of more than 600 lines, because the page has it as one script, whose hash its security
// policy names (headers.py): scripts that stand in a page cannot import one another.

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;

// gradio writes what is new into the elements that are there, so another comparison comes to the old
// one's viewer: it begins anew, without what listened to the old parts.
class Drawn extends HTMLElement {
  static observedAttributes = ["data-key"];

  attributeChangedCallback(name, before) {
    if (before === null) return;
    // once everything within is written as well.
    setTimeout(() => {
      if (!this.isConnected) return;
      this.stop();
      for (const child of [...this.children]) child.replaceWith(child.cloneNode(true));
      this.start();
    });
  }

  connectedCallback() {
    if (!this.started) this.start();
  }

  disconnectedCallback() {
    this.stop();
  }

  stop() {
    this.started = false;
  }
}

// one video of four panels (dense, sparse / difference, difference times `bright`) is drawn onto
// canvases: a single decoder cannot get out of step with itself.
class Viewer extends Drawn {
  start() {
    this.started = true;
    this.stopped = undefined;
    this.following = false;
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
    this.views(stage);
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

  stop() {
    super.stop();
    this.watcher.disconnect();
    this.video.pause();
    this.video.removeAttribute("src");
    this.video.load();
  }

  // side by side; one over the other up to a line that follows the hand; one at a time.
  views(stage) {
    const buttons = [...this.querySelectorAll("[data-view]")], wiper = this.querySelector(".wiper");
    const wipe = (share) => {
      wiper.value = Math.round(100 * Math.min(1, Math.max(0, share)));
      stage.style.setProperty("--wipe", `${wiper.value}%`);
    };
    const show = (view) => {
      stage.classList.toggle("flipped", view === "flip" && this.dataset.view === "flip" && !stage.classList.contains("flipped"));
      this.dataset.view = view;
      for (const each of buttons) each.setAttribute("aria-pressed", String(each.dataset.view === view));
      wiper.hidden = view !== "wipe";
    };
    for (const each of buttons) each.addEventListener("click", () => show(each.dataset.view));
    wiper.addEventListener("input", () => wipe(wiper.value / 100));
    const follow = (event) => {
      if (this.dataset.view !== "wipe" || !(event.buttons || event.type === "pointerdown")) return;
      const box = this.panels[0][0].getBoundingClientRect();
      wipe((event.clientX - box.left) / box.width);
    };
    stage.addEventListener("pointerdown", follow);
    stage.addEventListener("pointermove", follow);
    wipe(0.5);
    const full = this.querySelector(".full");
    full.addEventListener("click", () => {
      if (document.fullscreenElement) document.exitFullscreen(); else this.requestFullscreen();
    });
    this.addEventListener("fullscreenchange", () => {
      full.textContent = document.fullscreenElement ? "Leave full screen" : "Full screen";
    });
    // not on every device.
    full.hidden = !this.requestFullscreen;
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

  // once for every frame of the video where the browser tells them, not of the screen: drawing takes
  // time from the job that runs.
  follow() {
    if (this.following) return;
    this.following = true;
    const video = this.video;
    const soon = (done) => video.requestVideoFrameCallback?.(done) ?? requestAnimationFrame(done);
    const next = (_, shown) => {
      if (video !== this.video) return;
      if (video.paused) {
        this.following = false;
        return;
      }
      const time = shown?.mediaTime ?? video.currentTime;
      this.mark(Math.min(this.frames - 1, Math.max(0, Math.floor(time * this.fps + 0.01))));
      this.draw();
      soon(next);
    };
    soon(next);
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
class Heat extends Drawn {
  start() {
    this.started = true;
    this.chosen = undefined;
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

// the words of the prompt that the model never learned, marked while they are typed.
class Words extends HTMLElement {
  connectedCallback() {
    this.look(document.querySelector("#prompt textarea")?.value ?? "");
  }

  look(prompt) {
    const line = this.querySelector("p"), known = new Set(JSON.parse(this.dataset.known));
    const parts = prompt.split(/([\p{L}\p{N}_]+)/u);
    let strange = 0;
    line.replaceChildren(...parts.map((part, place) => {
      if (place % 2 === 0 || known.has(part.toLowerCase())) return part;
      strange += 1;
      const mark = document.createElement("mark");
      mark.textContent = part;
      return mark;
    }));
    line.append(" – it never learned what is marked, and will guess.");
    line.hidden = strange === 0;
  }
}

// an error that begins with the name of a setting is said at its field, until that is changed; the fold
// that holds the field is opened.
class Alert extends HTMLElement {
  static observedAttributes = ["data-said"];

  attributeChangedCallback(name, before) {
    if (before !== null) this.connectedCallback();
  }

  async connectedCallback() {
    this.clear();
    // a page that is opened again says how its last job ended, and nobody is to be led away by that.
    if (!navigator.userActivation?.hasBeenActive) return;
    const text = this.dataset.said;
    const word = text.match(/^(?:there (?:is|are) no |unknown |the )?([a-z]+(?:_[a-z]+)*)/)?.[1];
    const field = word && (await fieldOf(word));
    const input = field?.querySelector("input, textarea");
    if (!input || !this.isConnected || this.dataset.said !== text) return;
    const line = document.createElement("p");
    Object.assign(line, { className: "vs-wrong", id: `vs-wrong-${word}`, textContent: text });
    this.mark = { field, input, line };
    field.append(line);
    input.setAttribute("aria-invalid", "true");
    input.setAttribute("aria-describedby", line.id);
    // said once, and where it can be mended; the focused field tells screen readers.
    this.hidden = true;
    if (field.closest("#form.folded")) document.querySelector("vs-fold").fold(false);
    field.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
    input.focus({ preventScroll: true });
    field.addEventListener("input", () => this.clear(), { once: true });
  }

  disconnectedCallback() {
    this.clear();
  }

  clear() {
    if (!this.mark) return;
    const { input, line } = this.mark;
    input.removeAttribute("aria-invalid");
    input.removeAttribute("aria-describedby");
    line.remove();
    this.hidden = false;
    this.mark = undefined;
  }
}
// what is folded away is not in the page before it is opened.
async function fieldOf(word) {
  if (!document.querySelector(`.vs-field-${word}, .vs-holds-${word}`)) return undefined;
  for (let tries = 0; tries < 20; tries += 1) {
    const found = [...document.querySelectorAll(`.vs-field-${word}`)].find((each) => each.offsetParent);
    if (found) return found;
    for (const fold of document.querySelectorAll(`.vs-holds-${word}`)) {
      const content = fold.querySelector("[data-testid='accordion-content']");
      if (fold.offsetParent && content?.style.display === "none") fold.querySelector("button").click();
    }
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  return undefined;
}

// on a narrow screen the form stands above what it makes: it folds away once there is a result.
const narrow = matchMedia("(max-width: 900px)");
class Fold extends HTMLElement {
  connectedCallback() {
    this.button = this.querySelector("button");
    this.button.onclick = () => this.fold(this.button.getAttribute("aria-expanded") === "true");
    reopen();
    // what the page opens with is seen first.
    if (narrow.matches) this.begin();
  }

  // at once, and again until the prompt is there that the browser kept.
  begin() {
    if (this.opened) return;
    this.fold(true);
    if (!window.vidsparseRestored) setTimeout(() => this.begin(), 100);
  }

  fold(away) {
    document.getElementById("form").classList.toggle("folded", away);
    this.opened = !away;
    this.button.setAttribute("aria-expanded", String(!away));
    this.querySelector("span").textContent = away ? document.querySelector("#prompt textarea")?.value ?? "" : "";
  }
}
function showResults() {
  if (!narrow.matches) return;
  document.querySelector("#tabs").scrollIntoView({ behavior: calm ? "auto" : "smooth" });
}
// where the buttons stay in reach at the bottom, what they start shows further down.
let asked = -Infinity;
document.addEventListener("click", (event) => {
  if (!event.target.closest(".vs-run button.primary")) return;
  asked = event.timeStamp;
  showResults();
});
function ready() {
  // not from under a hand that is writing the next prompt.
  if (!narrow.matches || document.getElementById("form").contains(document.activeElement)) return;
  document.querySelector("vs-fold").fold(true);
  showResults();
}

// how a job stands is told in the tab's title and to screen readers: at its beginning and end, and at
// every quarter of the way, since each step would be too much to listen to.
const said = new Map();
function tell(status) {
  const { state, title, share } = status.dataset;
  const running = state === "running";
  document.title = running ? `${share} % ${title} - vidsparse` : `${title} - vidsparse`;
  const text = `${title}${running && Number(share) ? `, ${Math.floor(Number(share) / 25) * 25} %` : ""}`;
  const area = status.closest("[id]").id;
  if (said.get(area) === text) return;
  said.set(area, text);
  document.getElementById("vs-live").textContent = text;
  if (state === "done" && area !== "cell-status") ready();
}
// gradio calls a picture of the gallery by its number alone, which says nothing to who hears it.
function nameTiles(gallery) {
  for (const tile of gallery.querySelectorAll("button.thumbnail-item")) {
    const name = tile.querySelector(".caption-label")?.textContent.trim();
    if (name && tile.getAttribute("aria-label") !== name) tile.setAttribute("aria-label", name);
  }
}
// gradio says so once, answers no event from then on, and loads the page anew when the server is back,
// two seconds later or more. It ends the connection itself when it hears that the page is left: that is
// no loss for who is asked then, and one for who stays.
const LOST = "Connection to the server was lost";
let lost = false;
function listen() {
  const region = document.createElement("div");
  Object.assign(region, { id: "vs-live", className: "vs-sr" });
  region.setAttribute("role", "status");
  document.body.append(region);
  new MutationObserver((changes) => {
    const found = new Set();
    const gallery = document.getElementById("history");
    if (gallery && changes.some(({ target }) => gallery.contains(target))) nameTiles(gallery);
    for (const { target, addedNodes } of changes) {
      for (const node of [target, ...addedNodes]) {
        const element = node.nodeType === Node.ELEMENT_NODE ? node : node.parentElement;
        const status = element?.closest(".vs-status") ?? element?.querySelector(".vs-status");
        if (status) found.add(status);
        const toast = element?.closest(".toast-body") ?? element?.querySelector(".toast-body");
        if (toast?.textContent.includes(LOST)) setTimeout(() => { lost = true; }, 1000);
      }
    }
    // what another tab said earlier is no news.
    if (found.size === 1) found.forEach(tell);
  }).observe(document.body, { childList: true, subtree: true, characterData: true });
}
// gradio puts this script into a page that is there already, or into one that is being read.
if (document.body) listen();
else addEventListener("DOMContentLoaded", listen);

// a window that is loaded again opens the tab that was open. Gradio's own `selected` cannot: its first
// tab says that it was chosen before the page can be told of another.
const TAB = "vidsparse-tab";
addEventListener("pagehide", () => {
  const open = document.querySelector("#tabs [role='tab'][aria-selected='true']");
  if (open) sessionStorage.setItem(TAB, open.textContent.trim());
});
function reopen() {
  const name = sessionStorage.getItem(TAB);
  if (!name) return;
  const tabs = [...document.querySelectorAll("#tabs [role='tab']")];
  if (tabs.length === 0) setTimeout(reopen, 50);
  else tabs.find((tab) => tab.textContent.trim() === name)?.click();
}

// what a visitor writes while a choice is answered stays: an answer goes only into fields that hold
// what they held when it was asked for. By number, what was asked for and what the fields held.
const due = new Map();
let questions = 0;
const same = (one, other) => String(one ?? "") === String(other ?? "");
// these answers bring all numbers of a model, and what another choice is to leave alone is told from
// them: it waits until they are there, the last one alone, and is asked for beside them.
const WHOLE = ["kept", "model", "settings"];
let waiting;
// what each of these held when it was asked for or answered last.
const standing = { model: undefined, method: undefined, preset: undefined };
const isDue = (names) => [...due.values()].some((each) => names.includes(each.name));
function askWaiting(held) {
  const name = waiting;
  waiting = undefined;
  return name && vidsparseAsk(name, held);
}
function vidsparseAsk(name, held, told = held) {
  // a target that is emptied, as by every answer, is no choice: it would take the place of one that
  // waits.
  if (name === "target" && !held.target?.trim()) return undefined;
  waiting = !WHOLE.includes(name) && isDue(WHOLE) ? name : undefined;
  if (waiting) return undefined;
  questions += 1;
  due.set(questions, { name, held, told });
  if (name in standing) standing[name] = held[name];
  return JSON.stringify({ at: questions, name, held: told });
}
// a dropdown that is merely left says that it was chosen, and an answer would put a model's own numbers
// over those of a visitor.
function vidsparseChoose(name, held) {
  const left = standing[name] !== undefined && same(standing[name], held[name]);
  return left ? undefined : vidsparseAsk(name, held);
}
// where a model's own numbers are still to come, what is said of the speed waits with its question.
function vidsparseSpeed(held, notes) {
  const question = vidsparseChoose("speed", held);
  return [question, question && notes[held.model]?.[held.speed]];
}
// what each field holds that a speed fills, as the page put it there or a visitor wrote it last. No named
// speed stands for other numbers, and the line below it says so; a dropdown that is left changes nothing.
const filled = {};
function vidsparseByHand(name, value, said) {
  if (same(filled[name], value)) return [];
  filled[name] = value;
  return ["", "", said];
}
// what a link carries, or else the browser kept, is asked for as the page opens; `made` is what the
// fields hold then where nobody writes into them.
const WRITTEN = ["prompt", "negative_prompt", "seed", "videos", "prompt_lines"];
let answeredKept = false;
// a link need not carry what a visitor writes, and what it does not name stays.
function beside(held, linked) {
  const own = Object.entries(held ?? {}).filter(([name]) => WRITTEN.includes(name));
  return { ...Object.fromEntries(own), ...linked };
}
// while the connection is lost, what is written comes to none of the events that keep it: it is read
// from the fields as the page goes, for the one that takes its place; not before what was kept is back,
// since until then they hold what the page was made with.
const TYPED = "vidsparse-typed";
addEventListener("pagehide", () => {
  if (!lost || !window.vidsparseRestored) return;
  const typed = WRITTEN.flatMap((name) => {
    const input = document.querySelector(`.vs-field-${name} :is(input, textarea)`);
    // what is folded away is not in the page, nor was it written into.
    return input ? [[name, input.type === "number" ? input.valueAsNumber : input.value]] : [];
  });
  sessionStorage.setItem(TYPED, JSON.stringify(Object.fromEntries(typed)));
});
// what gradio keeps is the browser's, of whichever window wrote last: a new window begins with it, and
// one that is loaded again with its own.
const FORM = "vidsparse-form";
function vidsparseKeep(kept, values) {
  if (!window.vidsparseRestored) return kept;
  sessionStorage.setItem(FORM, JSON.stringify(values));
  return values;
}
function vidsparseReturn(held, made) {
  const linked = vidsparseLinked(), typed = JSON.parse(sessionStorage.getItem(TYPED));
  const own = JSON.parse(sessionStorage.getItem(FORM)) ?? held;
  const kept = typed ? { ...(own ?? made), ...typed } : own;
  const pictures = JSON.parse(sessionStorage.getItem(PICTURES));
  const found = linked ? beside(kept, linked) : kept && { ...kept, pictures };
  window.vidsparseRestored = found === null;
  Object.keys(standing).forEach((name) => { standing[name] = made[name]; });
  Object.assign(filled, made);
  return vidsparseAsk("kept", made, found);
}
// whether it stands in the fields, or never will: from then on it is they that are kept.
function vidsparseBack(kept, values) {
  window.vidsparseRestored ||= answeredKept;
  if (window.vidsparseRestored) sessionStorage.removeItem(TYPED);
  return vidsparseKeep(kept, values);
}
// the next question, where there is one, and what comes to each place of the page.
function vidsparseAnswered(answer, now, places) {
  const { at, updates } = JSON.parse(answer);
  const asked = due.get(at);
  // after one that was refused, gradio asks what waited behind it a second time.
  if (!asked) return [];
  for (const each of due.keys()) if (each <= at) due.delete(each);
  answeredKept ||= asked.name === "kept";
  // from now on another window's pictures are none of this one's.
  if (asked.name === "kept") keepPicture();
  const written = (place) => place in now && !same(now[place], asked.held[place]);
  const settled = (place) => updates[place].visible === false;
  // a preset that comes with a method leaves a video to the visitor that it is not for, also one
  // that is being written: the method is asked for again, beside what stands there now.
  const refused = asked.name === "method" && Object.keys(updates).some((each) => settled(each) && written(each));
  if (refused && at === questions) return [vidsparseAsk("method", now)];
  const put = {}, held = { ...now };
  for (const [place, { value, choices, ...facts }] of Object.entries(updates)) {
    // of a speed that is none any more.
    if (place === "speed facts" && written("speed")) continue;
    put[place] = { ...facts, __type__: "update" };
    const offered = choices?.map((each) => (Array.isArray(each) ? each : [each, each]));
    if (offered) put[place].choices = offered;
    const possible = !settled(place) && (!offered || offered.some(([, each]) => same(each, now[place])));
    // what is no longer offered gives way to the first that is.
    const next = value === undefined && offered && !possible ? offered[0][1] : value;
    if (next === undefined || (written(place) && possible)) continue;
    // a named size or length that another model does not have: its numbers are there, by hand.
    put[place].value = written(place) && (place === "size" || place === "length") ? "" : next;
    if (place in held) held[place] = put[place].value;
    if (place in standing) standing[place] = put[place].value;
    filled[place] = put[place].value;
    // to those who are still to be answered, what the page puts there was not written since.
    for (const each of due.values()) if (same(each.held[place], now[place])) each.held[place] = put[place].value;
  }
  return [askWaiting(held), ...places.map((place) => put[place])];
}
// as before, with a number of its own; what waits goes on waiting.
function askAgain({ name, held, told }) {
  const next = waiting;
  const again = vidsparseAsk(name, held, told);
  waiting = next;
  return again;
}
// no answer comes to the first that is due, and gradio does not ask what waited behind it, of which the
// last one counts. What the browser kept is asked for again, after a second, two, four and eight: while
// a proxy answers for a server that starts, the fields as the page was made should not take its place.
const TRIES = 4;
let tried = 0;
async function vidsparseRefused(now) {
  const [[at, first] = [], ...behind] = [...due].filter(([, each]) => !each.refused);
  const kept = first?.name === "kept";
  if (behind.length === 0 && kept && tried < TRIES) {
    first.refused = true;
    await new Promise((passed) => setTimeout(passed, 1000 * 2 ** tried));
    tried += 1;
    due.delete(at);
    if (at === questions) return askAgain(first);
    // all numbers of a model were asked for meanwhile, and their answer is on its way or there.
    answeredKept = true;
    return undefined;
  }
  answeredKept ||= kept;
  // chosen once more, it is asked for once more.
  for (const { name } of due.values()) if (name in standing) standing[name] = undefined;
  due.clear();
  return behind.length ? askAgain(behind.at(-1)[1]) : askWaiting(now);
}
// a speed whose numbers did not come, and are not asked for again, is not what would run.
async function vidsparseUnanswered(now, said) {
  const speed = [...due.values()].at(-1)?.name === "speed";
  const next = await vidsparseRefused(now);
  return speed && !next ? [next, "", "", said] : [next];
}

// what is made begins with the pictures that stood in the form when its button was pressed, also with
// those that were on their way. Of each upload: the files that the server looks at, in order, and the
// one that it took last; and how many it has refused.
const looking = { image: [], last_image: [] }, taken = {};
let refusals = 0;
const uploadOf = (name) => document.getElementById(name.replace("_", "-"));
function vidsparseLooking(name, file) {
  looking[name].push(file?.path ?? "");
  return file;
}
function vidsparseLooked(name, well, shown) {
  const path = looking[name].shift();
  taken[name] = well ? path : "";
  refusals += !well;
  keepPicture(name, shown?.path);
}
// the names of a window's own pictures, by which it finds them when it is loaded again.
const PICTURES = "vidsparse-pictures";
function keepPicture(name, path) {
  const kept = JSON.parse(sessionStorage.getItem(PICTURES)) ?? {};
  // the server shows the file as it keeps it, in a folder of gradio's.
  if (name) kept[name] = path?.match(/([^/\\]+)\.png$/)?.[1] ?? "";
  sessionStorage.setItem(PICTURES, JSON.stringify(kept));
}
// how it stood when the last button was pressed: an upload that does not arrive leaves its field as if
// nothing had been chosen there.
let press = { sending: [], refusals };
document.addEventListener("click", ({ target }) => {
  const row = target.closest(".vs-run button.primary")?.closest(".vs-run");
  if (!row) return;
  const sending = Object.keys(looking).filter((name) => uploadOf(name)?.querySelector(".uploading"));
  press = { sending, refusals };
  if (sending.length || Object.values(looking).some((files) => files.length)) sayWaiting(row);
}, true);
function sayWaiting(row) {
  const line = row.querySelector(".vs-waits") ?? document.createElement("p");
  Object.assign(line, { className: "vs-waits vs-note", textContent: "Waiting for the picture" });
  row.append(line);
  document.getElementById("vs-live").textContent = line.textContent;
}
// milliseconds within which gradio tells the server of a file that has arrived.
const TOLD = 3000;
async function vidsparsePictures(names, files) {
  const { sending, refusals: before } = press, until = performance.now() + TOLD;
  const untold = (name, path) => uploadOf(name) && path !== (taken[name] ?? "") && performance.now() < until;
  try {
    for (const [place, name] of names.entries()) {
      const path = files[place]?.path ?? "";
      if (sending.includes(name) && !path) throw new Error("the picture did not arrive");
      while (looking[name].length || untold(name, path)) await new Promise((passed) => setTimeout(passed, 50));
    }
    // the page says why; nothing is made without it.
    if (refusals !== before) throw new Error("the picture was refused");
  } finally {
    document.querySelectorAll(".vs-waits").forEach((line) => line.remove());
  }
}

// settings in the part of an address that no server is sent.
const MARK = "#settings=";
function vidsparseLink(values) {
  const link = location.href.split("#")[0] + MARK + encodeURIComponent(JSON.stringify(values));
  return { __type__: "update", value: link, visible: true };
}
function vidsparseLinked() {
  if (!location.hash.startsWith(MARK)) return null;
  let values = {};
  try {
    values = JSON.parse(decodeURIComponent(location.hash.slice(MARK.length)));
  } catch {
    // cut short on its way; the page says that it cannot be used.
  }
  // what is changed from here on should outlive a reload.
  history.replaceState(null, "", location.pathname + location.search);
  return { ...values, linked: true };
}

// a link that is put into the address of the open page is taken as if the page had opened with it.
function vidsparsePasted(held) {
  const linked = vidsparseLinked();
  return linked ? vidsparseAsk("kept", held, beside(held, linked)) : undefined;
}

// leaving with a job that runs or waits, also for a picture, asks first: it is given up unless the page
// is opened again. Just after a click the server may not have heard of it: while the browser asks, it
// does. Where the connection was lost, it is gradio that opens the page again, and a question that
// nobody sees would keep the job from being followed in time.
addEventListener("beforeunload", (event) => {
  if (lost) return;
  const heard = event.timeStamp - asked > 1000;
  if (!heard || document.querySelector(".vs-status[data-state='running'], .vs-waits")) event.preventDefault();
});

// one press of Cancel stops one job. The second click of a double click, a tap just after another and a
// key that is held are meant for the job that the first click named, and by then another may have
// taken its place.
const CANCEL = ".vs-cancel", DOUBLE = 500;
let pressed = -Infinity;
document.addEventListener("click", (event) => {
  if (!event.target.closest(CANCEL)) return;
  // not every device counts clicks, and some hands have their device wait longer for the second.
  if (event.detail > 1 || event.timeStamp - pressed < DOUBLE) event.stopPropagation();
  pressed = event.timeStamp;
}, true);
document.addEventListener("keydown", (event) => {
  if (event.repeat && event.target.closest(CANCEL)) event.preventDefault();
});

// what the open tab is for, from wherever one types.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
  const button = [...document.querySelectorAll(".vs-run button.primary")].find((each) => each.offsetParent);
  if (!button) return;
  event.preventDefault();
  // the field is left first, so that what was typed is what is asked for.
  document.activeElement?.blur();
  setTimeout(() => button.click());
});

// a dropdown of gradio's that Tab leads away from leaves its list open, and stumbles over it when the
// choices change; Escape closes it.
document.addEventListener("focusout", ({ target }) => {
  if (target.getAttribute("role") !== "combobox") return;
  const escape = new KeyboardEvent("keydown", { key: "Escape", bubbles: true });
  setTimeout(() => target.dispatchEvent(escape));
});

// a list that scrolls is a stop of its own for Tab, which would be gone with the list: from there the
// focus was nowhere.
document.addEventListener("keydown", ({ key, target }) => {
  if (key === "Tab") document.getElementById(target.getAttribute("aria-controls"))?.setAttribute("tabindex", "-1");
});

// gradio's player begins by itself; where less motion was asked for, it waits until it is touched.
if (calm) {
  let touched = -Infinity;
  for (const kind of ["pointerdown", "keydown"]) {
    document.addEventListener(kind, ({ target, timeStamp }) => {
      if (target.closest?.("#video")) touched = timeStamp;
    }, true);
  }
  document.addEventListener("play", ({ target, timeStamp }) => {
    if (target.closest("#video") && timeStamp - touched > 1000) target.pause();
  }, true);
}

customElements.define("vs-words", Words);
customElements.define("vs-alert", Alert);
customElements.define("vs-fold", Fold);
customElements.define("vs-viewer", Viewer);
customElements.define("vs-heat", Heat);
