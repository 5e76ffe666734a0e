package netpolicy

import (
	"fmt"
	"net/textproto"
	"slices"
	"strings"
)

// ProxyPort is the port of the proxy at the gateway's IPv4 address.
const ProxyPort = 3128

// Proxy is the HTTP proxy of an endpoint, at ProxyPort of its gateway. It opens nothing: the rules judge what goes
// through it. The zero value is no proxy.
type Proxy struct {
	// Enabled switches the proxy on.
	Enabled bool `json:"enabled,omitempty" yaml:"enabled,omitempty"`
	// Inject are secrets that the proxy puts into requests.
	Inject []Injection `json:"inject,omitempty" yaml:"inject,omitempty"`
}

// Injection makes the proxy put a secret into one header of requests over TLS, where the endpoint has written the
// secret's placeholder.
type Injection struct {
	// Secret is the name of the secret, and of the guest's environment variable with the placeholder.
	Secret string `json:"secret" yaml:"secret"`
	// Hosts are the names of the servers that get it. Each must be one of a rule's names. Patterns are not
	// allowed: any server with a name below the pattern would get the secret.
	Hosts []string `json:"hosts" yaml:"hosts"`
	// Ports are the ports of these hosts; absent, null or empty is 443.
	Ports []PortRange `json:"ports,omitempty" yaml:"ports,omitempty"`
	// Header is the field whose value is Prefix followed by the placeholder.
	Header string `json:"header" yaml:"header"`
	Prefix string `json:"prefix,omitempty" yaml:"prefix,omitempty"`
}

// ProxyOn reports whether the endpoint has a proxy.
func (p *Policy) ProxyOn() bool { return p != nil && p.Proxy != nil && p.Proxy.Enabled }

// Injects reports whether an injection uses the secret, so that the endpoint must not get it.
func (p *Policy) Injects(secret string) bool {
	return p != nil && p.Proxy != nil && slices.ContainsFunc(p.Proxy.Inject, func(i Injection) bool { return i.Secret == secret })
}

// Meets reports whether a request to a port of a host, in lower case, can get the secret.
func (i *Injection) Meets(host string, port uint16) bool {
	if len(i.Ports) == 0 {
		return port == 443 && slices.Contains(i.Hosts, host)
	}
	return contains(i.Ports, port) && slices.Contains(i.Hosts, host)
}

// ProxyVariables returns the environment variables of programs behind a proxy. No secret can have one of these
// names. The "*proxy" ones are also set in upper case.
func ProxyVariables() (proxy, all, authority []string) {
	// all and authority name certificate files: one with all trusted certificates, one with the proxy's alone.
	return []string{"http_proxy", "https_proxy", "no_proxy"},
		[]string{"SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO"},
		[]string{"NODE_EXTRA_CA_CERTS", "DENO_CERT"}
}

// notSecrets are variables that control what programs do.
var notSecrets = []string{"PATH", "HOME", "USER", "SHELL", "TERM", "LANG", "IFS", "PWD", "ENV", "BASH_ENV", "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "ALL_PROXY"}

// notInjected are header fields that control how a request is transferred, and to whom.
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
		return at("proxy.inject", "the proxy is not switched on: add enabled: true")
	}
	if len(inject) > MaxInjections {
		return at("proxy.inject", "%d: at most %d", len(inject), MaxInjections)
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
				return at(fmt.Sprintf("%s.hosts[%d]", where, k), "%s: no rule has that name, so it cannot be reached: add it to the names of a rule that allows it", h)
			}
		}
		hosts += len(i.Hosts)
		ports += len(i.Ports)
		for m := range inject[:n] {
			if strings.EqualFold(inject[m].Secret, i.Secret) && inject[m].Secret != i.Secret {
				return at(where+".secret", "%s and %s differ by case alone", inject[m].Secret, i.Secret)
			}
		}
	}
	if hosts > MaxNames || ports > MaxPortRanges {
		return at("proxy.inject", "%d hosts and %d port ranges: at most %d and %d", hosts, ports, MaxNames, MaxPortRanges)
	}
	return nil
}

// HasName reports whether a rule has a name. name is in lower case and without a final dot.
func (p *Policy) HasName(name string) bool {
	return slices.ContainsFunc(p.Rules, func(r Rule) bool { return matchesAny(r.Names, name) })
}

const (
	letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
	digits  = "0123456789"
)

func (i *Injection) validate(where string) error {
	if i.Secret == "" || len(i.Secret) > 64 || strings.Trim(i.Secret, letters+digits+"_") != "" || strings.ContainsAny(i.Secret[:1], digits) {
		return at(where+".secret", "%.80q: 1 to 64 letters, digits and _, and no digit at the beginning: it is the name of a variable as well", i.Secret)
	}
	proxy, all, authority := ProxyVariables()
	for _, v := range slices.Concat(notSecrets, proxy, all, authority) {
		if strings.EqualFold(v, i.Secret) {
			return at(where+".secret", "%s is a variable with a meaning of its own: name the secret otherwise", i.Secret)
		}
	}
	if len(i.Hosts) == 0 {
		return at(where+".hosts", "none: name the hosts that get the secret")
	}
	for k, h := range i.Hosts {
		if strings.HasPrefix(h, "*") {
			return at(fmt.Sprintf("%s.hosts[%d]", where, k), "%.80q: patterns are not allowed here: name each host", h)
		}
		if err := checkName(h); err != nil {
			return at(fmt.Sprintf("%s.hosts[%d]", where, k), "%w", err)
		}
	}
	if err := validatePorts(where, i.Ports); err != nil {
		return err
	}
	if i.Header == "" || len(i.Header) > MaxHeader || strings.Trim(i.Header, letters+digits+"!#$%&'*+-.^_`|~") != "" {
		return at(where+".header", "%.80q is not the name of a header, such as Authorization (RFC 9110, 5.1), of at most %d bytes", i.Header, MaxHeader)
	}
	if slices.Contains(notInjected, textproto.CanonicalMIMEHeaderKey(i.Header)) {
		return at(where+".header", "%s says how a request goes on: no secret can be there", i.Header)
	}
	if len(i.Prefix) > MaxHeader || strings.ContainsFunc(i.Prefix, func(c rune) bool { return c < ' ' || c > '~' }) || strings.HasPrefix(i.Prefix, " ") {
		return at(where+".prefix", "%.80q: at most %d printable ASCII characters, and no space at the beginning", i.Prefix, MaxHeader)
	}
	return nil
}
