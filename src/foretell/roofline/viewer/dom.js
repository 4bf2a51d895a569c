"use strict";
/* Elements of the page: the one that a selector names, and new ones. */
const $ = (selector) => document.querySelector(selector);
const element = (tag, properties, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
