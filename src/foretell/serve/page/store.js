// ---- conversations, kept in the browser: each under a key of its own, so that tabs do not overwrite each other ------
const STORE = "foretell", TALK = `${STORE}.talk.`, SETTINGS = `${STORE}.settings`;
const SAVE_MS = 1000, LEASE_MS = 4000;
const tab = `${Date.now()}-${Math.random()}`;
const state = { conversations: [], current: "", settings: {}, mode: "on" };

function read(key) {
  try { return JSON.parse(localStorage.getItem(key)); } catch { return null; }
}
function write(key, value) {
  // What a pass drafted is large, and of interest while the page is open only.
  const keep = (name, part) => (name === "passes" || name === "shown" || name === "key" ? undefined : part);
  try { localStorage.setItem(key, JSON.stringify(value, keep)); }
  catch { notify("This browser's storage is full or closed: the conversation is kept in this tab only."); }
}
function fresh() {
  return { id: `${Date.now()}-${Math.random().toString(36).slice(2)}`, title: "New conversation", messages: [] };
}
const talk = () => state.conversations.find(({ id }) => id === state.current);
const newestFirst = (a, b) => parseInt(b.id, 10) - parseInt(a.id, 10);

function load() {
  Object.assign(state, read(SETTINGS));
  const old = read(STORE);  // all in one record, as earlier versions kept them
  if (old) {
    Object.assign(state, { settings: old.settings ?? {}, mode: old.mode ?? "on" });
    const stamp = Date.now();
    old.conversations?.forEach((c, i) => write(`${TALK}${stamp - i}-old`, { ...c, id: `${stamp - i}-old` }));
    saveSettings();
    localStorage.removeItem(STORE);
  }
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(TALK));
  state.conversations = keys.map(read).filter((c) => c?.id && Array.isArray(c.messages)).sort(newestFirst);
  state.conversations.forEach((conversation) => { conversation.messages.forEach(modernise); mark(conversation); });
  if (!state.conversations.length) state.conversations.push(fresh());
  state.current = state.conversations[0].id;
}
/** Give a message of an earlier version the fields of this one. */
function modernise(message) {
  if (Array.isArray(message.spans)) {
    let at = 0;
    message.spans = { content: message.spans.map(([text, origin]) => [at, at += text.length, origin]) };
  }
  if (message.attached?.length && !message.files) {
    const name = message.attached.join(", "), head = `File ${message.attached[0]}:\n`.length;
    message.files = [{ name, text: message.sent.slice(head, message.sent.length - message.content.length).trimEnd() }];
  }
  if (message.plain) modernise(message.plain);
}
/** Say of an answer that no tab is writing any more that it is a part. */
function mark(conversation) {
  const last = conversation.messages.at(-1);
  if (last?.unfinished && !isBusyElsewhere(conversation)) last.note = "The page was closed before this answer ended.";
}
function saveSettings() { write(SETTINGS, { settings: state.settings, mode: state.mode }); }
function save(conversation) {
  conversation.saved = Date.now();
  conversation.busy = running.has(conversation.id) ? { tab, at: conversation.saved } : undefined;
  write(TALK + conversation.id, conversation);
}
function saveSometimes(conversation) {
  if (Date.now() - (conversation.saved ?? 0) > SAVE_MS) save(conversation);
}
/** Whether another tab is answering in this conversation. */
function isBusyElsewhere({ busy }) { return Boolean(busy && busy.tab !== tab && Date.now() - busy.at < LEASE_MS); }

/** Take what another tab has written; an answer that this tab is writing stays its own. */
function follow({ key, newValue }) {
  if (key === SETTINGS) { Object.assign(state, read(SETTINGS)); return; }
  if (!key?.startsWith(TALK)) return;
  const id = key.slice(TALK.length), at = state.conversations.findIndex((c) => c.id === id);
  if (running.has(id)) return;
  if (newValue === null) {
    if (at >= 0) forget(id);
  } else {
    const other = read(key);
    if (!other) return;
    if (at >= 0) state.conversations[at] = other; else state.conversations.push(other);
    state.conversations.sort(newestFirst);
  }
  render();
}
/** Leave a conversation out of the list; where it was shown, its neighbour is. */
function forget(id) {
  const at = state.conversations.findIndex((c) => c.id === id);
  state.conversations.splice(at, 1);
  if (!state.conversations.length) state.conversations.push(fresh());
  if (state.current === id) state.current = state.conversations[Math.min(at, state.conversations.length - 1)].id;
}
