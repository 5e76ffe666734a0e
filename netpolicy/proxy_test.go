package netpolicy_test

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

const proxyRules = `
rules: [{direction: egress, verdict: allow, names: [api.example.com, "*.example.net"], protocols: [tcp], ports: [443]}]
dns: {upstreams: ["192.0.2.53:53"]}
`

func TestParse_proxy(t *testing.T) {
	inject := func(s string) string { return proxyRules + "proxy: {enabled: true, inject: [" + s + "]}" }
	const good = `{secret: API_KEY, hosts: [api.example.com], header: Authorization, prefix: "Bearer "}`
	for name, c := range map[string]struct {
		text string
		want string // in the error; empty is none
		on   bool
	}{
		"absent is off":                   {proxyRules, "", false},
		"null is off":                     {proxyRules + "proxy: null", "", false},
		"empty is off":                    {proxyRules + "proxy: {}", "", false},
		"null within is off":              {proxyRules + "proxy: {enabled: null, inject: null}", "", false},
		"false is off":                    {proxyRules + "proxy: {enabled: false}", "", false},
		"on without secrets":              {proxyRules + "proxy: {enabled: true}", "", true},
		"on with one":                     {inject(good), "", true},
		"ports":                           {inject(`{secret: K, hosts: [a.example.net], ports: [443, 8000-8443], header: X-Key}`), "", true},
		"secrets without enabled":         {proxyRules + "proxy: {inject: [" + good + "]}", "enabled: true", false},
		"unknown field":                   {inject(`{secret: K, host: [api.example.com], header: X}`), "there is no such field", false},
		"no hosts":                        {inject(`{secret: K, header: X-Key}`), "hosts", false},
		"null hosts":                      {inject(`{secret: K, hosts: null, header: X-Key}`), "hosts", false},
		"empty hosts":                     {inject(`{secret: K, hosts: [], header: X-Key}`), "hosts", false},
		"pattern":                         {inject(`{secret: K, hosts: ["*.example.net"], header: X-Key}`), "patterns", false},
		"address":                         {inject(`{secret: K, hosts: ["93.184.216.34"], header: X-Key}`), "not a name", false},
		"upper case":                      {inject(`{secret: K, hosts: [API.example.com], header: X-Key}`), "not a name", false},
		"host that no rule has":           {inject(`{secret: K, hosts: [other.example.com], header: X-Key}`), "no rule has that name", false},
		"no secret":                       {inject(`{hosts: [api.example.com], header: X-Key}`), "secret", false},
		"secret that is no variable":      {inject(`{secret: api-key, hosts: [api.example.com], header: X-Key}`), "secret", false},
		"secret that begins with a digit": {inject(`{secret: 1KEY, hosts: [api.example.com], header: X-Key}`), "secret", false},
		"secret called PATH":              {inject(`{secret: PATH, hosts: [api.example.com], header: X-Key}`), "meaning of its own", false},
		"secret called like the proxy's":  {inject(`{secret: HTTPS_PROXY, hosts: [api.example.com], header: X-Key}`), "meaning of its own", false},
		"secrets that differ by case":     {inject(good + `, {secret: api_key, hosts: [api.example.com], header: X-Key}`), "case", false},
		"no header":                       {inject(`{secret: K, hosts: [api.example.com]}`), "header", false},
		"header with a colon":             {inject(`{secret: K, hosts: [api.example.com], header: "X:"}`), "header", false},
		"header Host":                     {inject(`{secret: K, hosts: [api.example.com], header: host}`), "no secret can be there", false},
		"header that ends a body":         {inject(`{secret: K, hosts: [api.example.com], header: Transfer-Encoding}`), "no secret can be there", false},
		"prefix with a line break":        {inject(`{secret: K, hosts: [api.example.com], header: X, prefix: "a\r\nb"}`), "prefix", false},
		"ports that are none":             {inject(`{secret: K, hosts: [api.example.com], header: X, ports: [0]}`), "ports", false},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			p, err := Parse([]byte(c.text))
			switch {
			case c.want == "" && err != nil:
				t.Fatal(err)
			case c.want != "" && (!errors.Is(err, ErrPolicy) || !strings.Contains(err.Error(), c.want)):
				t.Fatalf("%v, want an ErrPolicy with %q", err, c.want)
			case c.want != "":
				return
			}
			if p.ProxyOn() != c.on {
				t.Errorf("on: %v, want %v", p.ProxyOn(), c.on)
			}
			text, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			if again, err := Parse(text); err != nil || again.ProxyOn() != c.on {
				t.Errorf("read again from %s: %v, %v", text, again, err)
			}
		})
	}
	if (*Policy)(nil).ProxyOn() || (*Policy)(nil).Injects("K") {
		t.Error("no policy has a proxy")
	}
	many := inject(strings.TrimSuffix(strings.Repeat(good+",", MaxInjections+1), ","))
	if _, err := Parse([]byte(many)); !errors.Is(err, ErrPolicy) {
		t.Errorf("%d injections: %v", MaxInjections+1, err)
	}
}

func TestInjection_meets_its_hosts_and_ports_alone(t *testing.T) {
	i := Injection{Hosts: []string{"a.example"}}
	for _, c := range []struct {
		ports []PortRange
		host  string
		port  uint16
		want  bool
	}{
		{nil, "a.example", 443, true}, {nil, "a.example", 80, false}, {nil, "b.a.example", 443, false}, {nil, "", 443, false},
		{[]PortRange{}, "a.example", 443, true},
		{[]PortRange{{8443, 8444}}, "a.example", 8444, true}, {[]PortRange{{8443, 8444}}, "a.example", 443, false},
	} {
		i.Ports = c.ports
		if got := i.Meets(c.host, c.port); got != c.want {
			t.Errorf("%v: %s:%d: %v", c.ports, c.host, c.port, got)
		}
	}
}

// What is connected to on an agent's behalf is judged as the model judges the agent's own connections, but for the host
// and other agents, which are never.
func TestSpec_opens_beyond_the_host_what_the_model_opens(t *testing.T) {
	r := &random{Rand: rand.New(rand.NewPCG(*seedFlag, 77))}
	opened, closed := 0, 0
	for range 400 {
		r.names = r.one(2)
		r.makePolicy()
		s, err := Compile(r.policy, agent, r.env)
		if err != nil {
			t.Fatal(err)
		}
		m := refmodel.New(r.policy, agent, r.env)
		for range 60 {
			peer := r.addr().Unmap()
			if !peer.Is4() {
				continue
			}
			at := netip.AddrPortFrom(peer, r.port())
			pinned := []string{}
			for range r.IntN(3) {
				pinned = append(pinned, pick(r, "example.com", "a.example.com", "b.a.example.com", "example.org", "other.org"))
			}
			name := pick(r, "", "example.com", "a.example.com", "other.org")
			a := m.Ask(refmodel.Question{Direction: Egress, Protocol: TCP, Peer: peer, Port: at.Port(), Names: pinned, Hello: true, ServerName: name})
			want := a.Verdict == Allow && (a.Class == "public" || a.Class == "private")
			if got := s.Opens(at, pinned, name); got != want {
				t.Fatalf("seed %d: %v, pinned for %v, named %q: %v, the model says %+v", *seedFlag, at, pinned, name, got, a)
			}
			if want {
				opened++
			} else {
				closed++
			}
		}
	}
	if opened < 500 || closed < 500 {
		t.Errorf("%d were opened, %d not: there is nothing to compare", opened, closed)
	}
}

func TestLink_opens_what_its_policy_opens(t *testing.T) {
	ownNamespace(t)
	newTAP(t, "tap0")
	l, _ := attach(t, "tap0", proxyRules)
	peer := netip.MustParseAddrPort("93.184.216.34:443")
	opens := func(at netip.AddrPort, name string) bool {
		_, ok := l.Opens(at, name)
		return ok
	}
	if opens(peer, "api.example.com") {
		t.Error("an address that nobody has found for the name")
	}
	if err := l.Pin("api.example.com", peer.Addr(), 3600e9); err != nil {
		t.Fatal(err)
	}
	if rule, ok := l.Opens(peer, "api.example.com"); !ok || rule != "rules[0]" {
		t.Errorf("%q, %v", rule, ok)
	}
	for _, c := range []struct {
		at   string
		name string
	}{
		{"93.184.216.34:443", ""}, {"93.184.216.34:443", "evil.example"}, {"93.184.216.34:80", "api.example.com"},
		{"93.184.216.35:443", "api.example.com"}, {"169.254.169.254:443", "api.example.com"}, {"172.31.255.1:3128", ""},
		{"127.0.0.1:443", "api.example.com"}, {"10.0.0.1:443", "api.example.com"}, {"93.184.216.34:0", "api.example.com"}, {"[2001:db8::1]:443", "api.example.com"},
	} {
		if opens(netip.MustParseAddrPort(c.at), c.name) {
			t.Errorf("%s for %q is open", c.at, c.name)
		}
	}
	if err := l.Swap(compile(t, "")); err != nil {
		t.Fatal(err)
	}
	if opens(peer, "api.example.com") {
		t.Error("open by a policy that has been replaced")
	}
}

func TestProxyVariables_are_told_once(t *testing.T) {
	p, all, authority := ProxyVariables()
	list := slices.Concat(p, all, authority)
	slices.Sort(list)
	if len(slices.Compact(slices.Clone(list))) != len(list) {
		t.Errorf("%v", list)
	}
}
