package netpolicy

import (
	"fmt"
	"net/textproto"
	"slices"
	"strings"
)

// ProxyPort is the port of the gateway's IPv4 address at which an endpoint finds its proxy.
const ProxyPort = 3128

// Proxy is the HTTP proxy of an endpoint, at ProxyPort of its gateway. It opens nothing: what goes through
// it is judged by the rules. The zero value is none.
type Proxy struct {
	// Enabled switches it on.
	Enabled bool `json:"enabled,omitempty" yaml:"enabled,omitempty"`
	// Inject are secrets that it puts into requests.
	Inject []Injection `json:"inject,omitempty" yaml:"inject,omitempty"`
}

// Injection has the proxy put a secret into one header of requests over TLS, where the endpoint has
// written the secret's placeholder.
type Injection struct {
	// Secret is its name, and that of the variable in which programs in the guest find the placeholder.
	Secret string `json:"secret" yaml:"secret"`
	// Hosts are the names of servers that get it. Each has to be one of a rule's names. There are no patterns:
	// whoever gets a name below another one would get the secret.
	Hosts []string `json:"hosts" yaml:"hosts"`
	// Ports of these hosts; absent, null or empty is 443.
	Ports []PortRange `json:"ports,omitempty" yaml:"ports,omitempty"`
	// Header is the field whose value is Prefix and the placeholder.
	Header string `json:"header" yaml:"header"`
	Prefix string `json:"prefix,omitempty" yaml:"prefix,omitempty"`
}

// ProxyOn says whether the endpoint has a proxy.
func (p *Policy) ProxyOn() bool { return p != nil && p.Proxy != nil && p.Proxy.Enabled }

// Injects says whether the proxy has to do with a secret, so that the endpoint must not have it.
func (p *Policy) Injects(secret string) bool {
	return p != nil && p.Proxy != nil && slices.ContainsFunc(p.Proxy.Inject, func(i Injection) bool { return i.Secret == secret })
}

// Meets says whether a request to a port of a host, in lower case, can get the secret.
func (i *Injection) Meets(host string, port uint16) bool {
	if len(i.Ports) == 0 {
		return port == 443 && slices.Contains(i.Hosts, host)
	}
	return contains(i.Ports, port) && slices.Contains(i.Hosts, host)
}

// ProxyVariables are names that the environment of programs behind a proxy has, and that no secret can have.
// Those of "*proxy" are there in upper case as well.
func ProxyVariables() (proxy, all, authority []string) {
	// What they know of certificates: files with all that are trusted, and with the proxy's alone.
	return []string{"http_proxy", "https_proxy", "no_proxy"},
		[]string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO"},
		[]string{"NODE_EXTRA_CA_CERTS", "DENO_CERT"}
}

// notSecrets are variables that decide what programs do.
var notSecrets = []string{"PATH", "HOME", "USER", "SHELL", "TERM", "LANG", "IFS", "PWD", "ENV", "BASH_ENV", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "ALL_PROXY"}

// notInjected are fields that say how a message goes on, and to whom.
var notInjected = []string{
	"Host", "Connection", "Content-Length", "Transfer-Encoding", "Te", "Trailer", "Upgrade", "Keep-Alive", "Expect",
	"Proxy-Authorization", "Proxy-Connection", "Proxy-Authenticate", "Accept-Encoding",
}

func (p *Policy) validateProxy() error {
	if p.Proxy == nil {
		return nil
	}
	inject := p.Proxy.Inject
	if len(inject) > 0 && !p.Proxy.Enabled {
		return fmt.Errorf("proxy.inject: the proxy is not switched on: add enabled: true")
	}
	if len(inject) > MaxInjections {
		return fmt.Errorf("proxy.inject: %d: at most %d", len(inject), MaxInjections)
	}
	hosts, ports := 0, 0
	for n := range inject {
		where := fmt.Sprintf("proxy.inject[%d]", n)
		i := &inject[n]
		if err := i.validate(where); err != nil {
			return err
		}
		for k, h := range i.Hosts {
			if !p.HasName(h) {
				return fmt.Errorf("%s.hosts[%d]: %s: no rule has that name, so it cannot be reached: add it to the names of a rule that allows it", where, k, h)
			}
		}
		hosts += len(i.Hosts)
		ports += len(i.Ports)
		for m := range inject[:n] {
			if strings.EqualFold(inject[m].Secret, i.Secret) && inject[m].Secret != i.Secret {
				return fmt.Errorf("%s.secret: %s and %s differ by case alone", where, inject[m].Secret, i.Secret)
			}
		}
	}
	if hosts > MaxNames || ports > MaxPortRanges {
		return fmt.Errorf("proxy.inject: %d hosts and %d port ranges: at most %d and %d", hosts, ports, MaxNames, MaxPortRanges)
	}
	return nil
}

// HasName says whether a rule has a name, in lower case and without a final dot.
func (p *Policy) HasName(name string) bool {
	return slices.ContainsFunc(p.Rules, func(r Rule) bool { return matchesAny(r.Names, name) })
}

const (
	letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	digits  = "0123456789"
)

func (i *Injection) validate(where string) error {
	if i.Secret == "" || len(i.Secret) > 64 || strings.Trim(i.Secret, letters+digits+"_") != "" || strings.ContainsAny(i.Secret[:1], digits) {
		return fmt.Errorf("%s.secret: %.80q: 1 to 64 letters, digits and _, and no digit at the beginning: it is the name of a variable as well", where, i.Secret)
	}
	proxy, all, authority := ProxyVariables()
	for _, v := range slices.Concat(notSecrets, proxy, all, authority) {
		if strings.EqualFold(v, i.Secret) {
			return fmt.Errorf("%s.secret: %s is a variable with a meaning of its own: name the secret otherwise", where, i.Secret)
		}
	}
	if len(i.Hosts) == 0 {
		return fmt.Errorf("%s.hosts: none: name the hosts that get the secret", where)
	}
	for k, h := range i.Hosts {
		if strings.HasPrefix(h, "*") {
			return fmt.Errorf("%s.hosts[%d]: %.80q: patterns are not allowed here: name each host", where, k, h)
		}
		if err := checkName(h); err != nil {
			return fmt.Errorf("%s.hosts[%d]: %w", where, k, err)
		}
	}
	if err := validatePorts(where, i.Ports); err != nil {
		return err
	}
	if i.Header == "" || len(i.Header) > MaxHeader || strings.Trim(i.Header, letters+digits+"!#$%&'*+-.^_`|~") != "" {
		return fmt.Errorf("%s.header: %.80q is not the name of a header, such as Authorization (RFC 9110, 5.1), of at most %d bytes", where, i.Header, MaxHeader)
	}
	if slices.Contains(notInjected, textproto.CanonicalMIMEHeaderKey(i.Header)) {
		return fmt.Errorf("%s.header: %s says how a request goes on: no secret can be there", where, i.Header)
	}
	if len(i.Prefix) > MaxHeader || strings.ContainsFunc(i.Prefix, func(c rune) bool { return c < ' ' || c > '~' }) || strings.HasPrefix(i.Prefix, " ") {
		return fmt.Errorf("%s.prefix: %.80q: at most %d printable ASCII characters, and no space at the beginning", where, i.Prefix, MaxHeader)
	}
	return nil
}
