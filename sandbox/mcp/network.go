package mcp

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// maxPorts bounds a list of ports, and maxTable the bytes that are read of a guest's table of sockets.
const (
	maxPorts = 100
	maxTable = 1 << 20
)

type policyOut struct {
	Sandbox string `json:"sandbox"`
	Network bool   `json:"network" jsonschema:"whether it has a link at all; without, set_policy cannot allow anything"`
	Default string `json:"default" jsonschema:"what happens to connections that no rule names: deny or allow"`
	Rules   []rule `json:"rules" jsonschema:"the first that matches decides"`
}

type rule struct {
	Name      string `json:"name" jsonschema:"the destination, if allow named it"`
	Direction string `json:"direction" jsonschema:"egress (from the sandbox) or ingress"`
	Verdict   string `json:"verdict" jsonschema:"allow or deny"`
}

type setPolicyIn struct {
	one
	Allow []string `json:"allow" jsonschema:"all network destinations that it may reach from now on; empty is none"`
}

type setPolicyOut struct {
	Sandbox string   `json:"sandbox"`
	Allow   []string `json:"allow"`
	Live    bool     `json:"live" jsonschema:"in force now; otherwise from the next wake on"`
}

type port struct {
	Port      uint16   `json:"port"`
	Address   string   `json:"address,omitempty" jsonschema:"where a program in the sandbox listens"`
	Published []string `json:"published,omitempty" jsonschema:"address and port of the host where it can be reached"`
}

type portsOut struct {
	Sandbox string `json:"sandbox"`
	Ports   []port `json:"ports"`
	Reach   string `json:"reach" jsonschema:"how the user of the host reaches a port"`
}

// allowSchema describes the destinations that a model may choose.
func (s *Server) allowSchema(in *jsonschema.Schema) {
	p := property(in, "allow")
	p.MaxItems = new(len(s.o.Allow))
	p.UniqueItems = true
	if len(s.o.Allow) > 0 {
		oneOf(in, "allow", s.o.Allow)
	}
}

// mayAllow checks that the model may open destinations. Each must be one of those of the options, word for word: what
// is a part of what cannot be said of names and addresses.
func (s *Server) mayAllow(words []string) error {
	for _, w := range words {
		if slices.Contains(s.o.Allow, w) {
			continue
		}
		if len(s.o.Allow) == 0 {
			return errors.New("this server gives sandboxes no network: its user starts it with --allow-net to change that; leave allow out")
		}
		return fmt.Errorf("destination %.128q may not be allowed: use some of %s, word for word; the user of this server adds others with --allow-net", w, strings.Join(s.o.Allow, ", "))
	}
	return nil
}

// policy returns a policy that allows destinations and has all else of an earlier one.
func (s *Server) policy(allow []string, from *netpolicy.Policy) (*netpolicy.Policy, error) {
	p := &netpolicy.Policy{}
	if len(allow) > 0 {
		var err error
		if p, err = s.o.Policy(allow); err != nil {
			return nil, err
		}
	}
	p.Publish, p.Proxy, p.Limits, p.Quota, p.Flows = from.Publish, from.Proxy, from.Limits, from.Quota, from.Flows
	if p.DNS == nil {
		p.DNS = from.DNS
	}
	return p, p.Validate()
}

// policyOf returns the policy of a sandbox, and nil if that has no network.
func (s *Server) policyOf(b *sandbox.Sandbox) (*netpolicy.Policy, error) {
	r, err := s.o.Host.State.Get(b.Name())
	if err != nil || r.Spec.Network != spec.NetworkTAP {
		return nil, err
	}
	return b.Policy()
}

func (s *Server) addNetwork() {
	add(s, tool{
		name: "get_policy", title: "Show the network policy", readOnly: true, idempotent: true, limit: useTime, edit: named,
		says: "Show what a sandbox may reach over the network. Does not wake it.",
	}, func(_ context.Context, _ *call, in one) (out policyOut, err error) {
		b, err := s.sandbox(in.Sandbox)
		if err != nil {
			return out, err
		}
		p, err := s.policyOf(b)
		if err != nil {
			return out, err
		}
		out = policyOut{Sandbox: in.Sandbox, Network: p != nil, Default: verdict(""), Rules: []rule{}}
		if p == nil {
			return out, nil
		}
		out.Default = verdict(p.Default.Egress)
		for _, r := range p.Rules {
			out.Rules = append(out.Rules, rule{r.Name, string(r.Direction), verdict(r.Verdict)})
		}
		return out, nil
	})
	add(s, tool{
		name: "set_policy", title: "Set the network policy", destructive: true, idempotent: true, limit: useTime,
		says: "Replace what a sandbox may reach over the network. Connections that are not allowed any more are cut at once. Only destinations that " +
			"list_sandboxes names can be allowed. Does not wake it.",
		edit: func(in *jsonschema.Schema) { named(in); s.allowSchema(in) },
	}, s.setPolicy)
	add(s, tool{
		name: "list_ports", title: "List ports", readOnly: true, idempotent: true, limit: useTime, edit: named,
		says: fmt.Sprintf("List the TCP ports on which programs in a sandbox listen, and where the host publishes them: at most %d. Wakes a sandbox that sleeps.", maxPorts),
	}, s.ports)
}

func verdict(v netpolicy.Verdict) string {
	if v == netpolicy.Allow {
		return "allow"
	}
	return "deny" // also if it is absent
}

func (s *Server) setPolicy(ctx context.Context, _ *call, in setPolicyIn) (out setPolicyOut, err error) {
	b, err := s.sandbox(in.Sandbox)
	if err == nil {
		err = s.mayAllow(in.Allow)
	}
	if err != nil {
		return out, err
	}
	was, err := s.policyOf(b)
	if err != nil {
		return out, err
	}
	if was == nil {
		if len(in.Allow) == 0 {
			return setPolicyOut{Sandbox: in.Sandbox, Allow: []string{}}, nil // it reaches nothing already
		}
		return out, fmt.Errorf("sandbox %s was made without a network: make another with create_sandbox and allow", in.Sandbox)
	}
	p, err := s.policy(in.Allow, was)
	if err != nil {
		return out, err
	}
	res, err := b.SetPolicy(ctx, p)
	return setPolicyOut{in.Sandbox, append([]string{}, in.Allow...), res.Live}, err
}

func (s *Server) ports(ctx context.Context, _ *call, in one) (out portsOut, err error) {
	b, err := s.sandbox(in.Sandbox)
	if err != nil {
		return out, err
	}
	c, err := b.Connect(ctx)
	if err != nil {
		return out, err
	}
	defer c.Close()
	var ports []port
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		var table bytes.Buffer
		_, err := c.ReadFile(ctx, name, &table, 0, maxTable)
		if errors.Is(err, fs.ErrNotExist) {
			continue // without IPv6
		}
		if err != nil {
			return out, err
		}
		ports = append(ports, listening(table.String())...)
	}
	p, err := s.policyOf(b)
	if err != nil {
		return out, err
	}
	if p == nil {
		p = &netpolicy.Policy{}
	}
	for _, pub := range p.Publish {
		if pub.Protocol != netpolicy.TCP {
			continue
		}
		found := false
		for i := range ports {
			if ports[i].Port == pub.Port {
				ports[i].Published, found = append(ports[i].Published, pub.Listen.String()), true
			}
		}
		if !found {
			ports = append(ports, port{Port: pub.Port, Published: []string{pub.Listen.String()}})
		}
	}
	slices.SortFunc(ports, func(a, b port) int { return int(a.Port) - int(b.Port) })
	out = portsOut{Sandbox: in.Sandbox, Ports: []port{}, Reach: fmt.Sprintf("`drowse port-forward %s 8080:PORT` on the host, then http://127.0.0.1:8080", in.Sandbox)}
	out.Ports = append(out.Ports, ports[:min(len(ports), maxPorts)]...)
	return out, nil
}

// listening returns the ports of a table of TCP sockets in the form of proc_net_tcp(5), which the guest wrote.
func listening(table string) (out []port) {
	const listen = "0A"
	for line := range strings.Lines(table) {
		f := strings.Fields(line)
		if len(f) < 4 || f[3] != listen {
			continue
		}
		host, number, _ := strings.Cut(f[1], ":")
		n, err := strconv.ParseUint(number, 16, 16)
		raw, herr := hex.DecodeString(host)
		if err != nil || herr != nil || len(raw)%4 != 0 {
			continue
		}
		for i := 0; i < len(raw); i += 4 { // words in the order of the host
			slices.Reverse(raw[i : i+4])
		}
		at, ok := netip.AddrFromSlice(raw)
		if !ok {
			continue
		}
		out = append(out, port{Port: uint16(n), Address: at.Unmap().String()})
		if len(out) == maxPorts {
			return out
		}
	}
	return out
}
