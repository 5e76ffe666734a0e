package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// Route is where a request goes.
type Route struct {
	// Sandbox is the name of a sandbox, which may not exist.
	Sandbox string
	// Port is a TCP port of the guest's loopback interface, from 1 on.
	Port uint16
}

// Resolver finds the route of a request. Its methods are called from many goroutines, with a client's words. They
// return ErrRoute if these name no route.
type Resolver interface {
	// Resolve returns the route of an HTTP request, by Request.Host and header fields.
	Resolve(r *http.Request) (Route, error)
	// ResolveName returns the route of a connection by the server name of its TLS.
	ResolveName(serverName string) (Route, error)
}

// ErrRoute means that a request names no sandbox and port.
var ErrRoute = errors.New("the request names no sandbox and port")

// Header fields of requests to a gateway. The guest sees none of them.
const (
	// HeaderSandbox and HeaderPort are the route of a request whose host is the domain itself.
	HeaderSandbox = "Drowse-Sandbox"
	HeaderPort    = "Drowse-Port"
	// HeaderToken is the sandbox's token.
	HeaderToken = "Drowse-Token"
)

// Names is the Resolver of the form {port}-{sandbox}.{domain}. If the host is the domain itself, HeaderSandbox and
// HeaderPort say the route; at other hosts they are an error.
type Names struct {
	// Domain is a domain name in lower case, such as "sandboxes.example.com".
	Domain string
}

var domainRE = lazyregexp.New(`^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)

// ValidDomain reports whether a domain can be that of Names: host names below it must have 253 bytes at most.
func ValidDomain(domain string) bool { return len(domain) <= 200 && domainRE.MatchString(domain) }

// Resolve implements Resolver.
func (n Names) Resolve(r *http.Request) (Route, error) {
	name, port := r.Header.Values(HeaderSandbox), r.Header.Values(HeaderPort)
	if len(name) == 0 && len(port) == 0 {
		host, err := withoutPort(r.Host)
		if err != nil {
			return Route{}, err
		}
		return n.ResolveName(host)
	}
	host, err := withoutPort(r.Host)
	if err != nil {
		return Route{}, err
	}
	if !strings.EqualFold(strings.TrimSuffix(host, "."), n.Domain) {
		return Route{}, fmt.Errorf("%w: %s and %s go with the host %s only", ErrRoute, HeaderSandbox, HeaderPort, n.Domain)
	}
	if len(name) != 1 || len(port) != 1 {
		return Route{}, fmt.Errorf("%w: use %s and %s once each", ErrRoute, HeaderSandbox, HeaderPort)
	}
	return parseRoute(port[0], name[0])
}

// ResolveName implements Resolver.
func (n Names) ResolveName(host string) (Route, error) {
	label, domain, _ := strings.Cut(strings.TrimSuffix(lower(host), "."), ".")
	if domain != n.Domain || domain == "" {
		return Route{}, fmt.Errorf("%w: use the host {port}-{sandbox}.%s", ErrRoute, n.Domain)
	}
	port, name, ok := strings.Cut(label, "-")
	if !ok {
		return Route{}, fmt.Errorf("%w: use the host {port}-{sandbox}.%s", ErrRoute, n.Domain)
	}
	return parseRoute(port, name)
}

// Host returns the host name of a route.
func (n Names) Host(r Route) string { return fmt.Sprintf("%d-%s.%s", r.Port, r.Sandbox, n.Domain) }

// parseRoute reads a port and a name as clients write them. There is one way to write each: whatever else judges
// requests by their host must not be misled.
func parseRoute(port, name string) (Route, error) {
	p, err := strconv.ParseUint(port, 10, 16)
	if err != nil || p == 0 || strconv.FormatUint(p, 10) != port {
		return Route{}, fmt.Errorf("%w: the port is a number from 1 to 65535", ErrRoute)
	}
	if !spec.ValidName(name) {
		return Route{}, fmt.Errorf("%w: the name of the sandbox is not one", ErrRoute)
	}
	return Route{Sandbox: name, Port: uint16(p)}, nil
}

// withoutPort returns the host of a Host field, which may end with a port.
func withoutPort(host string) (string, error) {
	name, port, ok := strings.Cut(host, ":")
	if !ok {
		return name, nil
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("%w: the host has no valid port", ErrRoute)
	}
	return name, nil
}

// lower is strings.ToLower for ASCII alone: other letters whose lower case is ASCII, such as the Kelvin sign, stay.
func lower(s string) string {
	return strings.Map(func(r rune) rune {
		if 'A' <= r && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s)
}
