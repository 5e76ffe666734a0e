// The styles of xterm.js under a policy that allows none inline. xterm.js writes <style> elements and style attributes; this document
// gives it elements that set the same by script, which the policy does not concern (CSP 3, style-src).

// styleElement is like a <style>: its text is a sheet of the document until it is removed.
function styleElement() {
  const e = document.createElement('span');
  const sheet = new CSSStyleSheet();
  e.hidden = true;
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  Object.defineProperty(e, 'textContent', { set: (text) => sheet.replaceSync(text) });
  e.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((s) => s !== sheet);
    Element.prototype.remove.call(e);
  };
  return e;
}

function setAttribute(name, value) {
  if (name === 'style') this.style.cssText = value;
  else Element.prototype.setAttribute.call(this, name, value);
}

function createElement(tag) {
  if (tag === 'style') return styleElement();
  const e = document.createElement(tag);
  if (tag === 'span') e.setAttribute = setAttribute;
  return e;
}

// styledDocument is the document, but for such elements: xterm.js takes it as documentOverride.
export function styledDocument() {
  return new Proxy(document, {
    get(target, key) {
      if (key === 'createElement') return createElement;
      const value = Reflect.get(target, key, target);
      return typeof value === 'function' ? value.bind(target) : value;
    },
    set: (target, key, value) => Reflect.set(target, key, value, target),
  });
}
