"use strict";
// The page at "/": streams one prompt from this server, with drafts and, to compare, without them and from another.

const $ = (id) => document.getElementById(id);
const SOURCES = {
  accepted: "drafted and accepted",
  correction: "drawn where a draft was wrong",
  bonus: "bonus: drawn after every draft was accepted",
  plain: "drawn without a draft",
};
const TOP = 5;
let running = null; // AbortController of the present run
let drafted = false; // does this server speculate?

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
}

async function post(base, path, body, signal) {
  const response = await fetch(base + path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(messageOf(await response.json().catch(() => ({})), response.status));
  return response;
}

function messageOf(body, status) {
  return body.message || (body.error && (body.error.message || body.error)) || "HTTP " + status;
}

async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function about() {
  try {
    const response = await fetch("server_info", { headers: headers() });
    $("keybox").hidden = response.status !== 401 && !$("key").value;
    if (response.status === 401) { $("about").textContent = "this server wants an API key"; return; }
    const info = await response.json();
    if (info.status === "starting") setTimeout(about, 1500);
    drafted = Boolean(info.speculative_algorithm) && info.speculative_num_draft_tokens > 1;
    $("plain").disabled = !drafted;
    $("plainbox").hidden = !drafted;
    document.querySelectorAll("#legend .drafts").forEach((item) => { item.hidden = !drafted; });
    const draft = drafted ? `draft ${info.speculative_algorithm}, blocks of ${info.speculative_num_draft_tokens}` : "no draft";
    $("about").textContent = `${info.served_model_name} · ${draft} · ${info.dtype} on ${info.device} · ${info.status}`;
  } catch (error) {
    $("about").textContent = "the server does not answer";
    setTimeout(about, 3000);
  }
}

function makePanel(title) {
  const panel = document.createElement("section");
  panel.className = "panel";
  panel.innerHTML = `<h2></h2><dl class="numbers"></dl><div class="blocks" aria-hidden="true"></div><div class="text" aria-live="off"></div>`;
  panel.querySelector("h2").textContent = title;
  $("panels").append(panel);
  return { panel, text: panel.querySelector(".text"), numbers: panel.querySelector(".numbers"), blocks: panel.querySelector(".blocks"), ids: [], started: 0, first: 0, rounds: 0, open: 0, drafted: 0, tokens: 0 };
}

function colour(logprob) {
  return Math.max(0, Math.min(130, 130 * Math.exp(logprob / 2))); // green: sure, red: surprising
}

// What each token adds to the text. Half a character has no text of its own: the token that completes it shows it.
function textsOf(tokens, delta) {
  const shown = [];
  let rest = delta, halves = [];
  for (const [i, [, , text]] of tokens.entries()) {
    shown.push(text);
    if (text.includes("\uFFFD")) { shown[i] = ""; halves.push(i); continue; }
    const at = halves.length ? rest.indexOf(text) : rest.startsWith(text) ? 0 : -1;
    if (at < 0) continue; // a special token
    if (halves.length) shown[halves.at(-1)] = rest.slice(0, at);
    halves = [];
    rest = rest.slice(at + text.length);
  }
  if (halves.length) shown[halves.at(-1)] = rest;
  return shown;
}

function addToken(view, [logprob, id, text], shown, top, source) {
  const span = document.createElement("span");
  span.className = "token " + source;
  span.style.setProperty("--hue", colour(logprob));
  span.textContent = shown;
  span.setAttribute("aria-describedby", "tip");
  span.tabIndex = view.tokens === 0 ? 0 : -1;
  span.info = { logprob, id, text, top, source };
  view.text.append(span);
  view.ids.push(id);
  view.tokens += 1;
}

function show(view, last) {
  const now = performance.now();
  const seconds = (now - view.first) / 1000;
  view.speed = view.tokens > 1 ? (view.tokens - 1) / seconds : 0;
  const values = {
    tokens: view.tokens,
    "tokens/s": view.speed ? view.speed.toFixed(1) : "–",
    "first token": (view.first - view.started).toFixed(0) + " ms",
    rounds: view.rounds,
    "tokens a round": view.rounds ? ((view.tokens - 1) / view.rounds).toFixed(2) : "–",
  };
  if (last) {
    const reason = last.meta_info.finish_reason;
    values.end = reason.type;
    if (last.meta_info.sampling_seed !== undefined) values.seed = last.meta_info.sampling_seed;
  }
  view.numbers.replaceChildren(...Object.entries(values).map(([name, value]) => {
    const row = document.createElement("div");
    const term = document.createElement("dt"), data = document.createElement("dd");
    term.textContent = name;
    data.textContent = value;
    row.append(term, data);
    return row;
  }));
}

// An event may hold several rounds: each ends with the one token that was not drafted. The first token is the prompt's.
function countToken(view, source) {
  if (!view.first) { view.first = performance.now(); return; }
  view.open += 1;
  if (source !== "accepted") closeRound(view);
}

function closeRound(view) {
  view.rounds += 1;
  addBlock(view, view.open);
  view.open = 0;
}

function addBlock(view, size) {
  const bar = document.createElement("i");
  bar.style.height = Math.min(100, size * 11) + "%";
  bar.title = size + " tokens";
  view.blocks.append(bar);
}

async function generate({ base, more }, view, seed, signal) {
  const prompt = $("prompt").value;
  const body = {
    sampling_params: { max_new_tokens: Number($("tokens").value), temperature: Number($("temperature").value), sampling_seed: seed },
    stream: true, incremental_stream: true, return_logprob: true, top_logprobs_num: TOP,
    return_text_in_logprobs: true, return_token_sources: true, logprobs_kind: $("kind").value, ...more,
  };
  if ($("mode").value === "chat") {
    const answer = await post(base, "tokenize", { messages: [{ role: "user", content: prompt }] }, signal);
    body.input_ids = (await answer.json()).tokens;
  } else body.text = prompt;
  view.started = performance.now();
  for await (const event of eventsOf(await post(base, "generate", body, signal))) {
    if (event.error) throw new Error(event.error.message);
    const meta = event.meta_info;
    meta.token_sources.forEach((source) => countToken(view, source));
    if (meta.finish_reason && view.open) closeRound(view); // the end cut it short
    const shown = textsOf(meta.output_token_logprobs, event.text);
    meta.output_token_logprobs.forEach((token, i) => addToken(view, token, shown[i], meta.output_top_logprobs[i], meta.token_sources[i]));
    show(view, meta.finish_reason ? event : null);
  }
}

async function run() {
  if (running) running.abort();
  const controller = (running = new AbortController());
  $("panels").replaceChildren();
  $("same").textContent = "";
  $("same").className = "";
  $("legend").hidden = false;
  $("stop").disabled = false;
  const runs = [{ title: drafted ? "With drafts" : "Answer", base: "", more: {} }];
  if (drafted && $("plain").checked) runs.push({ title: "Plain: without drafts", base: "", more: { max_drafts: 0 } });
  const other = $("other").value.trim().replace(/\/*$/, "");
  if (other) runs.push({ title: other, base: other + "/", more: {} });
  const views = runs.map(({ title }) => makePanel(title));
  // chosen here, so that all get the same and a JavaScript number holds it exactly
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 48) : Number($("seed").value);
  if ($("panels").getBoundingClientRect().top > 0.6 * innerHeight) $("panels").scrollIntoView({ behavior: "smooth" });
  let failed = false;
  // one after the other: side by side they would share the machine and show neither's speed
  for (const [i, view] of views.entries()) {
    view.panel.classList.add("live");
    try {
      await generate(runs[i], view, seed, controller.signal);
    } catch (error) {
      if (controller.signal.aborted) { note(view, "Stopped."); break; }
      failed = true;
      note(view, error instanceof TypeError ? "The server does not answer: " + error.message : error.message, "error");
    } finally {
      view.panel.classList.remove("live");
    }
  }
  if (views.length > 1 && !failed && !controller.signal.aborted) verdict(runs, views);
  if (running === controller) { running = null; $("stop").disabled = true; }
}

function note(view, text, kind = "") {
  const line = document.createElement("p");
  line.className = "note " + kind;
  line.textContent = text;
  view.panel.append(line);
}

function verdict(runs, views) {
  const same = views.every((view) => view.ids.join() === views[0].ids.join());
  const plain = views[runs.findIndex(({ more }) => more.max_drafts === 0)];
  let told = same ? "The same tokens each time." : "The tokens differ: are the models the same?";
  if (same && plain && views[0].speed && plain.speed) {
    told += ` With drafts ${(views[0].speed / plain.speed).toFixed(2)} times as fast as plain.`;
  }
  $("same").textContent = told;
  $("same").className = same ? "" : "differ";
}

function stop() {
  if (running) running.abort();
  running = null;
  $("stop").disabled = true;
}

function tell(span) {
  const tip = $("tip");
  const { logprob, id, top, source } = span.info;
  const rows = top.map(([value, other, text]) => `<tr class="${other === id ? "chosen" : ""}"><td></td><td>${(100 * Math.exp(value)).toFixed(2)} %</td><td>${value.toFixed(4)}</td></tr>`);
  tip.innerHTML = `<div></div><table>${rows.join("")}</table>`;
  tip.firstChild.textContent = `token ${id} · logprob ${logprob.toFixed(4)} · ${SOURCES[source]}`;
  top.forEach(([, , text], i) => { tip.querySelectorAll("tr")[i].firstChild.textContent = JSON.stringify(text); });
  tip.hidden = false;
  const box = span.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(box.left, innerWidth - tip.offsetWidth - 8)) + "px";
  const below = box.bottom + 6 + tip.offsetHeight < innerHeight;
  tip.style.top = (below ? box.bottom + 6 : box.top - tip.offsetHeight - 6) + "px";
}

$("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
$("stop").addEventListener("click", stop);
$("key").addEventListener("change", about);
$("panels").addEventListener("mouseover", (event) => { if (event.target.info) tell(event.target); });
$("panels").addEventListener("mouseout", () => { $("tip").hidden = true; });
$("panels").addEventListener("focusin", (event) => { if (event.target.info) tell(event.target); });
$("panels").addEventListener("focusout", () => { $("tip").hidden = true; });
$("panels").addEventListener("keydown", (event) => {
  if (!event.target.info) return;
  const all = event.target.parentElement;
  const next = {
    ArrowRight: event.target.nextElementSibling, ArrowLeft: event.target.previousElementSibling,
    Home: all.firstElementChild, End: all.lastElementChild,
  }[event.key];
  if (next) { event.preventDefault(); event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") { stop(); $("tip").hidden = true; }
});
// #run starts at once, so that a link can show an answer
about().then(() => { if (location.hash === "#run") run(); });
