// The styles of xterm.js under a policy that allows none inline. xterm.js writes <style> elements and style attributes. Once this has
// been called, the document makes elements that set the same by script, which the policy does not concern (CSP 3, style-src).

// styleElement is like a <style>: its text is a sheet of the document until it is removed.
function styleElement(e) {
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

// styleByScript changes what this document makes: no other part of the page makes <style> elements or sets style attributes.
export function styleByScript() {
  document.createElement = (tag, options) => {
    if (tag === 'style') return styleElement(Document.prototype.createElement.call(document, 'span'));
    const e = Document.prototype.createElement.call(document, tag, options);
    if (tag === 'span') e.setAttribute = setAttribute;
    return e;
  };
}
