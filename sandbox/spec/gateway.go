package spec

import (
	"fmt"
	"slices"
	"strings"
)

// Gateway says whom the gateway of `drowse serve` lets in to the ports of a sandbox. The zero value lets in only
// requests with the sandbox's token, to each port.
type Gateway struct {
	// PublicPorts are ports that anyone may use; at most MaxGatewayPorts. AllPublic is every port.
	PublicPorts []uint16 `json:"public_ports,omitempty"`
	AllPublic   bool     `json:"all_public,omitempty"`
	// GuestTLS are ports whose raw connections the gateway passes on encrypted; at most MaxGatewayPorts.
	GuestTLS []uint16 `json:"guest_tls,omitempty"`
	// Host replaces the Host of HTTP requests, and "${PORT}" in it is the port: for servers that refuse foreign
	// names. At most MaxGatewayHost bytes.
	Host string `json:"host,omitempty"`
	// IdleStreams lets the sandbox sleep although connections are open, if they have carried nothing for its idle
	// time. They are cut then. By default an open connection keeps the sandbox awake.
	IdleStreams bool `json:"idle_streams,omitempty"`
	// Tokens counts the tokens that the sandbox has had: a new one invalidates the one before.
	Tokens uint32 `json:"tokens,omitempty"`
}

// Limits of a Gateway.
const (
	MaxGatewayPorts = 64
	MaxGatewayHost  = 255
)

// Opens reports whether anyone may use a port.
func (g Gateway) Opens(port uint16) bool {
	return port != 0 && (g.AllPublic || slices.Contains(g.PublicPorts, port))
}

// Empty reports whether it is the zero value.
func (g Gateway) Empty() bool {
	return len(g.PublicPorts) == 0 && !g.AllPublic && len(g.GuestTLS) == 0 && g.Host == "" && !g.IdleStreams && g.Tokens == 0
}

// forChild returns what a fork has of it: no port of a fork is open, until its owner opens it.
func (g Gateway) forChild() Gateway {
	return Gateway{Host: g.Host, IdleStreams: g.IdleStreams, GuestTLS: slices.Clone(g.GuestTLS)}
}

func (g Gateway) check() error {
	for field, list := range map[string][]uint16{"public_ports": g.PublicPorts, "guest_tls": g.GuestTLS} {
		if len(list) > MaxGatewayPorts {
			return InField(field, fmt.Errorf("%w: %d ports of the gateway in a list: use at most %d", ErrMetadata, len(list), MaxGatewayPorts))
		}
		if slices.Contains(list, 0) {
			return InField(field, fmt.Errorf("%w: port 0 of the gateway: use 1 to 65535", ErrMetadata))
		}
	}
	if len(g.Host) > MaxGatewayHost {
		return InField("host", fmt.Errorf("%w: the gateway's host has %d bytes: use at most %d", ErrMetadata, len(g.Host), MaxGatewayHost))
	}
	for _, r := range strings.ReplaceAll(g.Host, "${PORT}", "") {
		if (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(".-_:[]", r) {
			return InField("host", fmt.Errorf("%w: the gateway's host %q: use a host name or address, with ${PORT} for the port", ErrMetadata, g.Host))
		}
	}
	return nil
}
