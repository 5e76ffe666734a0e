//go:build browser

package browsertest

import (
	"net/http"
	"net/netip"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/internal/test/chromium"
	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// aPolicy lets one name pass.
func aPolicy() *netpolicy.Policy {
	return &netpolicy.Policy{
		Version: 1, DNS: &netpolicy.DNS{Upstreams: []netip.AddrPort{netip.MustParseAddrPort("192.0.2.53:53")}},
		Rules: []netpolicy.Rule{{Name: "packages", Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Names: []string{"pypi.org"}, Protocols: []netpolicy.Protocol{netpolicy.TCP}, Ports: []netpolicy.PortRange{{First: 443, Last: 443}}}},
	}
}

// edits replaces a part of the policy's text.
func (b *tab) edits(from, to string) {
	b.t.Helper()
	b.must(b.Eval(b.ctx, `(() => { const e = document.querySelector('#policy-text'); if (!e.value.includes(`+quote(from)+`)) throw new Error('no such text in ' + e.value); e.value = e.value.replace(`+quote(from)+`, `+quote(to)+`); e.dispatchEvent(new Event('input', {bubbles: true})) })()`, nil))
}

func testPolicyEdit(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.runNet(t, "a", aPolicy())
	h.run(t, "without", spec.Metadata{})
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/policy", 1280, 900)
	p.sees("pypi.org")
	p.wait(`document.querySelector('#policy-save').getAttribute('aria-disabled') === 'true' && document.querySelector('#policy-save').title === 'Nothing is changed.'`)
	p.both("policy")
	p.edits(`"pypi.org"`, `"pypi.org", "*.pythonhosted.org"`)
	p.click("#policy-save")
	p.sees("Saved. It holds from now on.")
	if is, err := h.Host.Sandbox("a").Policy(); err != nil || len(is.Rules[0].Names) != 2 {
		t.Errorf("%+v, %v", is, err)
	}
	p.wait(`document.querySelector('#policy-holds').innerText.includes('*.pythonhosted.org')`)

	// What is wrong is said at the text, and its line is marked.
	p.expected = append(p.expected, "/policy", "/flows")
	p.edits(`"egress"`, `"sideways"`)
	p.click("#policy-save")
	p.wait(`document.querySelector('#policy-text').getAttribute('aria-invalid') === 'true' && document.activeElement.id === 'policy-text'`)
	if said := p.str(`document.querySelector('#policy-error').textContent`); !strings.Contains(said, "direction") {
		t.Errorf("it says %q", said)
	}
	p.edits(`"sideways"`, `"egress"`)
	p.edits(`"rules"`, `"rulez"`)
	p.click("#policy-save")
	p.wait(`document.querySelector('#policy-error').textContent.includes('rulez')`)
	if marked := p.str(`(() => { const e = document.querySelector('#policy-text'); return e.value.slice(e.selectionStart, e.selectionEnd) })()`); !strings.Contains(marked, "rulez") {
		t.Errorf("the line %q is marked", marked)
	}
	p.shot("policy-error")
	p.click("#policy-revert")
	p.wait(`!document.querySelector('#policy-text').value.includes('rulez') && document.querySelector('#policy-error').hidden`)

	// Somebody else changes it meanwhile.
	p.edits(`"name": "packages"`, `"name": "mine"`)
	theirs := aPolicy()
	theirs.Rules[0].Ports = []netpolicy.PortRange{{First: 8443, Last: 8443}}
	if _, err := h.Host.Sandbox("a").SetPolicy(t.Context(), theirs); err != nil {
		t.Fatal(err)
	}
	p.click("#policy-save")
	p.sees("It was changed meanwhile.")
	if diff := p.str(`[...document.querySelectorAll('.diff .added, .diff .taken')].map((e) => e.textContent.replace(/ +/g, ' ')).join('|')`); !strings.Contains(diff, `+ "8443"`) || !strings.Contains(diff, `- "443"`) || strings.Contains(diff, "mine") {
		t.Errorf("the difference is %q", diff)
	}
	p.wait(`document.activeElement.id === 'policy-theirs' && document.querySelector('#policy-text').value.includes('"mine"')`)
	p.both("policy-conflict")
	if is, err := h.Host.Sandbox("a").Policy(); err != nil || is.Rules[0].Name != "packages" {
		t.Errorf("it was saved: %+v, %v", is, err)
	}
	p.click("#policy-over")
	p.sees("Saved.")
	if is, err := h.Host.Sandbox("a").Policy(); err != nil || is.Rules[0].Name != "mine" {
		t.Errorf("%+v, %v", is, err)
	}

	// The server fails in the middle: the text stays.
	p.edits(`"mine"`, `"again"`)
	h.meanwhile(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPut {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, r)
	})
	p.click("#policy-save")
	p.wait(`document.querySelector('#notices').innerText.includes('cannot be reached') && document.querySelector('#policy-text').value.includes('"again"')`)
	h.meanwhile(nil)
	p.click("#policy-save")
	p.sees("Saved.")

	p.must(p.Eval(p.ctx, `location.hash = '#/sandbox/without/policy'`, nil))
	p.sees("no network")
	p.wait(`!document.querySelector('#policy-text').checkVisibility()`)
}

func testPolicySuggestions(t *testing.T, b *chromium.Browser) {
	h := newHost(t)
	h.runNet(t, "a", aPolicy())
	deny := func(name, peer, protocol string, port uint16, reason netpolicy.Reason) netpolicy.FlowRecord {
		f := flow("deny", name, "")
		f.Peer, f.Protocol, f.PeerPort, f.Reason = netip.MustParseAddr(peer), protocol, port, reason
		return f
	}
	h.flows = []netpolicy.FlowRecord{
		deny("files.example", "203.0.113.9", "tcp", 443, netpolicy.ReasonDefault), deny("files.example", "203.0.113.9", "tcp", 443, netpolicy.ReasonDefault),
		deny("", "203.0.113.10", "udp", 123, netpolicy.ReasonDefault), deny("", "2001:db8::1", "tcp", 22, netpolicy.ReasonRule),
		deny("", "169.254.169.254", "tcp", 80, netpolicy.ReasonFloor), // nothing opens it
		flow("allow", "pypi.org", "packages"),
	}
	h.serve(t)
	p := open(t, b, h, "#/sandbox/a/policy", 360, 740)
	p.sees("tcp files.example port 443, denied 2 times")
	if n := p.str(`[...document.querySelectorAll('.suggestions button')].map((b) => b.dataset.rule).join('|')`); n != "tcp files.example port 443|tcp 2001:db8::1 port 22|udp 203.0.113.10 port 123" {
		t.Errorf("suggested are %s", n)
	}
	p.fits("the policy")
	p.both("policy-narrow")
	p.tabTo(".suggestions button")
	p.shot("policy-suggestions")
	p.press("Enter")
	p.wait(`document.activeElement.textContent === 'Added' && document.activeElement.getAttribute('aria-disabled') === 'true'`)
	p.press("Tab")
	p.press("Enter")
	p.wait(`document.activeElement.textContent === 'Added'`)
	for range 8 {
		p.press("Shift+Tab")
		if p.str(`document.activeElement.id`) == "policy-save" {
			break
		}
	}
	p.press("Enter")
	p.sees("Saved. It holds from now on.")
	p.wait(`[...document.querySelectorAll('.suggestions button')].map((b) => b.textContent).join() === 'Added,Added,Allow'`)
	is, err := h.Host.Sandbox("a").Policy()
	if err != nil {
		t.Fatal(err)
	}
	if len(is.Rules) != 3 || is.Rules[1].Names[0] != "files.example" || is.Rules[0].CIDRs[0].String() != "2001:db8::1/128" || is.Rules[2].Name != "packages" {
		t.Errorf("the rules are %+v", is.Rules)
	}
}
