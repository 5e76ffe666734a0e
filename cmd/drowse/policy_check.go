//go:build linux

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/netpolicy/hostnet"
	"github.com/drowse-vm/drowse/netpolicy/refmodel"
)

// policyVerbs are the commands on policies that need the host.
func (a *app) policyVerbs() []*cobra.Command {
	return []*cobra.Command{a.policyCheckCommand(), a.policyExplainCommand(), a.policyTagCommand()}
}

// surroundings are the flags that describe the agent of a policy and its network.
type surroundings struct {
	address, address6 string
	host, agents      []string
	onLink            []string
	peers             []string
}

func (s *surroundings) flags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&s.address, "address", "10.200.0.2", "the VM's own IPv4 address")
	f.StringVar(&s.address6, "address6", "", "the VM's own IPv6 address (default: no IPv6)")
	f.StringSliceVar(&s.host, "host", nil, "addresses of the host")
	f.StringSliceVar(&s.onLink, "on-link", nil, "ranges with neighbours of the host, which count as private")
	f.StringSliceVar(&s.agents, "agents", []string{hostnet.DefaultRange.String(), hostnet.DefaultRange6.String()}, "ranges of the VMs' addresses")
	f.StringArrayVar(&s.peers, "peer", nil, "another VM, as ADDRESS=TAG,TAG...")
}

func (s *surroundings) parse() (id netpolicy.Identity, env netpolicy.Environment, err error) {
	if id.Address4, err = netip.ParseAddr(s.address); err != nil {
		return id, env, usageError{fmt.Errorf("--address: %w", err)}
	}
	if s.address6 != "" {
		if id.Address6, err = netip.ParseAddr(s.address6); err != nil {
			return id, env, usageError{fmt.Errorf("--address6: %w", err)}
		}
	}
	if env.Host, err = parsed(s.host, netip.ParseAddr); err != nil {
		return id, env, usageError{fmt.Errorf("--host: %w", err)}
	}
	if env.OnLink, err = parsed(s.onLink, netip.ParsePrefix); err != nil {
		return id, env, usageError{fmt.Errorf("--on-link: %w", err)}
	}
	if env.Endpoints, err = parsed(s.agents, netip.ParsePrefix); err != nil {
		return id, env, usageError{fmt.Errorf("--agents: %w", err)}
	}
	for _, p := range s.peers {
		addr, tags, _ := strings.Cut(p, "=")
		parsed, err := netip.ParseAddr(addr)
		if err != nil {
			return id, env, usageError{fmt.Errorf("--peer: %w: use ADDRESS=TAG,TAG", err)}
		}
		env.Peers = append(env.Peers, netpolicy.Peer{Address: parsed, Tags: strings.FieldsFunc(tags, func(r rune) bool { return r == ',' })})
	}
	return id, env, nil
}

// compile compiles a policy for the surroundings.
func (s *surroundings) compile(p *netpolicy.Policy) (*netpolicy.Spec, netpolicy.Identity, netpolicy.Environment, error) {
	id, env, err := s.parse()
	if err != nil {
		return nil, id, env, err
	}
	spec, err := netpolicy.Compile(p, id, env)
	if errors.Is(err, netpolicy.ErrIdentity) {
		err = usageError{err}
	}
	return spec, id, env, err
}

func (a *app) policyCheckCommand() *cobra.Command {
	var s surroundings
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a policy file, and show what it opens",
		Long: `Check a policy file (YAML or JSON, - for stdin), and show what it opens. If it is not valid, the
exit status is 2, and the message names line and field.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			p, err := readPolicy(args[0])
			if err != nil {
				return err
			}
			spec, _, _, err := s.compile(p)
			if err != nil {
				return err
			}
			r := checkReport{Valid: true, Rules: len(p.Rules), Default: p.Default, TableBytes: spec.Bytes(), Warnings: warnings(p)}
			for _, u := range p.Rules {
				if u.Verdict == netpolicy.Allow {
					r.Allows++
				}
			}
			r.Default.Egress, r.Default.Ingress = cmp.Or(r.Default.Egress, netpolicy.Deny), cmp.Or(r.Default.Ingress, netpolicy.Deny)
			return a.print(r, func(w io.Writer) {
				fmt.Fprintf(w, "valid: %d rules, of which %d allow; by default egress is %s and ingress %s\n", r.Rules, r.Allows, verb(r.Default.Egress), verb(r.Default.Ingress))
				for _, warning := range r.Warnings {
					fmt.Fprintln(w, "note: "+warning)
				}
			})
		},
	}
	s.flags(cmd)
	return cmd
}

type checkReport struct {
	Valid      bool               `json:"valid"`
	Rules      int                `json:"rules"`
	Allows     int                `json:"allows"`
	Default    netpolicy.Defaults `json:"default"`
	TableBytes int                `json:"table_bytes"`
	Warnings   []string           `json:"warnings"`
}

func verb(v netpolicy.Verdict) string {
	return map[netpolicy.Verdict]string{netpolicy.Allow: "allowed", netpolicy.Deny: "denied", netpolicy.Reject: "rejected"}[v]
}

// warnings lists parts of a policy that are valid but perhaps not intended.
func warnings(p *netpolicy.Policy) []string {
	out := []string{}
	for i, r := range p.Rules {
		where := fmt.Sprintf("rules[%d]", i)
		if r.Name != "" {
			where += fmt.Sprintf(" (%s)", r.Name)
		}
		var missing []string
		if len(r.CIDRs)+len(r.Groups)+len(r.Names)+len(r.Endpoints) == 0 {
			missing = append(missing, "peers (cidrs, groups, names or agents)")
		}
		if len(r.Protocols) == 0 {
			missing = append(missing, "protocols")
		}
		if len(r.Ports) == 0 && !(len(r.Protocols) > 0 && !slices.ContainsFunc(r.Protocols, func(p netpolicy.Protocol) bool { return p != netpolicy.ICMP })) {
			missing = append(missing, "ports")
		}
		if len(r.Names) > 0 && slices.ContainsFunc(r.Protocols, func(p netpolicy.Protocol) bool { return p == netpolicy.UDP || p == netpolicy.AnyProtocol }) && r.ChecksNames() {
			out = append(out, where+" has names that are checked in TLS, and does not open UDP by them at those ports (443, or those of tls)")
		}
		if len(missing) == 0 {
			continue
		}
		what := strings.Join(missing, ", ")
		if r.Verdict == netpolicy.Allow {
			out = append(out, where+" names no "+what+", and so allows nothing there: write any for all")
		} else {
			out = append(out, where+" names no "+what+", and so denies all there")
		}
	}
	return out
}

func (a *app) policyExplainCommand() *cobra.Command {
	var s surroundings
	var packet, serverName string
	var names []string
	cmd := &cobra.Command{
		Use:   "explain FILE --packet 'DIRECTION PROTOCOL PEER[:PORT]'",
		Short: "Explain what a policy does with a packet",
		Long: `Explain what a policy does with a packet that opens a flow. DIRECTION is egress (from the VM) or
ingress (to it). PROTOCOL is tcp, udp or icmp. PEER is the address of the other side, in
brackets if it is IPv6 with a port. PORT is the destination port.

The answer says where names are checked in TLS. --server-name shows what a connection with that
name gets; an empty one stands for a connection without a name.`,
		Example: `  drowse policy explain web.yaml --packet 'egress tcp 93.184.216.34:443'
  drowse policy explain web.yaml --packet 'egress tcp [2606:4700::1111]:443' --address6 fd00::2
  drowse policy explain web.yaml --packet 'egress tcp 151.101.0.223:443' --name pypi.org`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := readPolicy(args[0])
			if err != nil {
				return err
			}
			q, err := parsePacket(packet)
			if err != nil {
				return usageError{fmt.Errorf("--packet %q: %w", packet, err)}
			}
			q.Names = names
			q.Hello, q.ServerName = cmd.Flags().Changed("server-name"), strings.ToLower(serverName)
			_, id, env, err := s.compile(p)
			if err != nil {
				return err
			}
			env.TLSPort = explainedPort
			r := explain(p, id, env, q)
			return a.print(r, func(w io.Writer) { r.write(w, p) })
		},
	}
	cmd.Flags().StringVar(&packet, "packet", "", "the packet: direction, protocol, peer and port")
	cmd.Flags().StringSliceVar(&names, "name", nil, "names that the resolver resolved to the peer's address")
	cmd.Flags().StringVar(&serverName, "server-name", "", "server name in the TLS of the connection")
	s.flags(cmd)
	return cmd
}

// explainedPort stands for the port where a VM's process checks names. The real one differs for each VM. Programs
// are unlikely to use this one.
const explainedPort = 65535

// explanation is the output of explain.
type explanation struct {
	Direction netpolicy.Direction `json:"direction"`
	Protocol  netpolicy.Protocol  `json:"protocol"`
	Peer      netip.Addr          `json:"peer"`
	Port      uint16              `json:"port,omitempty"`
	Class     string              `json:"class"`
	Verdict   netpolicy.Verdict   `json:"verdict"`
	Reason    netpolicy.Reason    `json:"reason"`
	// Rule is the index of the deciding rule, or null if no rule decided.
	Rule     *int   `json:"rule"`
	RuleName string `json:"rule_name,omitempty"`
	// Checked means that the connection ends on the host, and is continued only if its TLS server name is one of
	// the rules'.
	Checked bool `json:"checked,omitempty"`
}

func explain(p *netpolicy.Policy, id netpolicy.Identity, env netpolicy.Environment, q refmodel.Question) explanation {
	e := explanation{Direction: q.Direction, Protocol: q.Protocol, Peer: q.Peer, Port: q.Port}
	if q.Peer.Is6() && !id.Address6.IsValid() {
		e.Class, e.Verdict, e.Reason = "none", netpolicy.Deny, netpolicy.ReasonIPv6Off
		return e
	}
	answer := refmodel.New(p, id, env).Ask(q)
	if answer.Checked && q.Peer.Is6() {
		answer.Verdict, answer.Reason = netpolicy.Deny, netpolicy.ReasonTLSOff
	}
	e.Checked = answer.Checked
	e.Class, e.Verdict, e.Reason, e.RuleName = answer.Class, answer.Verdict, answer.Reason, answer.Implicit
	if answer.Rule >= 0 {
		e.Rule, e.RuleName = &answer.Rule, p.Rules[answer.Rule].Name
	}
	return e
}

func (e explanation) write(w io.Writer, p *netpolicy.Policy) {
	t := columns(w)
	peer := e.Peer.String()
	if e.Port != 0 {
		peer = netip.AddrPortFrom(e.Peer, e.Port).String()
	}
	fmt.Fprintf(t, "packet\t%s %s %s\n", e.Direction, e.Protocol, peer)
	fmt.Fprintf(t, "peer is\t%s\n", e.Class)
	fmt.Fprintf(t, "verdict\t%s\n", e.Verdict)
	why := map[netpolicy.Reason]string{
		netpolicy.ReasonFloor:   "no rule can open this address",
		netpolicy.ReasonDefault: "no rule matches, so it is the default of " + string(e.Direction),
		netpolicy.ReasonIPv6Off: "the VM has no IPv6 address (--address6)",
	}[e.Reason]
	switch {
	case e.Rule != nil && e.RuleName != "":
		why = fmt.Sprintf("rules[%d], %q", *e.Rule, e.RuleName)
	case e.Rule != nil:
		why = fmt.Sprintf("rules[%d]", *e.Rule)
	case e.RuleName != "":
		why = e.RuleName
	}
	if e.Reason == netpolicy.ReasonDefault && e.Class != "public" {
		d := p.Default.Egress
		if e.Direction == netpolicy.Ingress {
			d = p.Default.Ingress
		}
		if d == netpolicy.Allow {
			why += ", which allows public addresses alone"
		}
	}
	switch e.Reason {
	case netpolicy.ReasonTLSName:
		why += ", but the server name is none of the rules'"
	case netpolicy.ReasonTLSNoName:
		why += ", but there is no server name"
	case netpolicy.ReasonTLSOff:
		why += ", but names are not checked over IPv6"
	default:
		if e.Checked {
			why += ", if the server name in TLS is one of the rules' (--server-name)"
		}
	}
	fmt.Fprintf(t, "because\t%s\n", why)
	t.Flush()
}

func parsePacket(s string) (q refmodel.Question, err error) {
	words := strings.Fields(s)
	if len(words) != 3 {
		return q, errors.New("say direction, protocol and peer, as in 'egress tcp 192.0.2.1:443'")
	}
	q.Direction, q.Protocol = netpolicy.Direction(words[0]), netpolicy.Protocol(words[1])
	if q.Direction != netpolicy.Egress && q.Direction != netpolicy.Ingress {
		return q, fmt.Errorf("direction %q: egress or ingress", words[0])
	}
	switch q.Protocol {
	case netpolicy.ICMP:
		if q.Peer, err = netip.ParseAddr(strings.Trim(words[2], "[]")); err != nil {
			return q, fmt.Errorf("peer %q: an address, without a port", words[2])
		}
	case netpolicy.TCP, netpolicy.UDP:
		ap, err := netip.ParseAddrPort(words[2])
		if err != nil || ap.Port() == 0 {
			return q, fmt.Errorf("peer %q: an address and a port, as in 192.0.2.1:443 or [2001:db8::1]:443", words[2])
		}
		q.Peer, q.Port = ap.Addr(), ap.Port()
	default:
		return q, fmt.Errorf("protocol %s: tcp, udp or icmp", strconv.Quote(words[1]))
	}
	if q.Peer.Zone() != "" {
		return q, errors.New("leave out the zone")
	}
	return q, nil
}
