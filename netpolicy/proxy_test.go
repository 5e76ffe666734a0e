package netpolicy_test

import (
	"encoding/json"
	"errors"
	"slices"
	"strings"
	"testing"

	. "github.com/drowse-vm/drowse/netpolicy"
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
		want string // in the error; empty means none
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

func TestProxyVariables_are_told_once(t *testing.T) {
	p, all, authority := ProxyVariables()
	list := slices.Concat(p, all, authority)
	slices.Sort(list)
	if len(slices.Compact(slices.Clone(list))) != len(list) {
		t.Errorf("%v", list)
	}
}
