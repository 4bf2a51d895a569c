"use strict";
const $ = (selector) => document.querySelector(selector);
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}
const given = (value) => value !== undefined && value !== null && value !== "";
const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
