package main

import (
	"bufio"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// netOpen is a value of --net beside those of spec.VM.Network: the public internet, and nothing of the host's networks.
const netOpen = "open"

// netFlags say what the network may do to and for a VM: a policy file, or a common policy in one word.
type netFlags struct {
	net, policy string
	allow       []string
}

// add adds --net, --allow and --policy. without says what holds if none of them is given.
func (n *netFlags) add(cmd *cobra.Command, with, without string) {
	f := cmd.Flags()
	f.StringVar(&n.net, "net", "", with+"network: none, open (all public addresses), or tap (what --policy and --allow open)")
	f.StringArrayVar(&n.allow, "allow", nil, with+"open one destination: NAME, ADDRESS, CIDR or none, [:PORT[-PORT]][/udp], such as pypi.org, 10.1.0.0/16:5432 or :53/udp; repeatable")
	f.StringVar(&n.policy, "policy", "", with+"file with the network policy, - for stdin (default: "+without+")")
	cmd.MarkFlagsMutuallyExclusive("policy", "allow")
}

// read returns the policy and the network that the flags ask for: nil and "" if they say nothing of it.
func (n *netFlags) read() (p *netpolicy.Policy, network string, err error) {
	switch n.net {
	case "", spec.NetworkNone, spec.NetworkTAP:
		network = n.net
	case netOpen:
		network = spec.NetworkTAP
	case "bridge", "default", "host":
		return nil, "", usageError{fmt.Errorf("--net %s: use open for all public addresses, --allow NAME for some, or none", n.net)}
	default:
		return nil, "", usageError{fmt.Errorf("--net %q: use none, open or tap; VMs reach each other by their tags, see `drowse policy`", n.net)}
	}
	switch {
	case n.net == spec.NetworkNone && (n.policy != "" || len(n.allow) > 0):
		return nil, "", usageError{errors.New("--net none does not go with --policy and --allow")}
	case n.net == netOpen && (n.policy != "" || len(n.allow) > 0):
		return nil, "", usageError{errors.New("--net open opens all that --policy and --allow could: give one of them")}
	case n.policy != "":
		p, err = readPolicy(n.policy)
	case n.net == netOpen || len(n.allow) > 0:
		p, err = n.common()
	}
	if p != nil && network == "" {
		network = spec.NetworkTAP
	}
	return p, network, err
}

// over returns the policy for a copy of a VM, which has the network of its original.
func (n *netFlags) over() (*netpolicy.Policy, error) {
	p, _, err := n.read()
	switch {
	case err != nil:
		return nil, err
	case n.net == spec.NetworkTAP && p == nil:
		return nil, usageError{errors.New("--net tap: a copy has the network of its original; use none, open, --allow or --policy")}
	case n.net == spec.NetworkNone:
		return &netpolicy.Policy{}, nil
	}
	return p, nil
}

// common makes the policy of --net open and --allow.
func (n *netFlags) common() (*netpolicy.Policy, error) {
	p := &netpolicy.Policy{}
	if n.net == netOpen {
		p.Default.Egress = netpolicy.Allow
	}
	for _, word := range n.allow {
		r, err := parseAllow(word)
		if err != nil {
			return nil, usageError{fmt.Errorf("--allow %q: %w", word, err)}
		}
		p.Rules = append(p.Rules, r)
	}
	// Without a resolver no name leads anywhere.
	var err error
	if p.DNS, err = hostDNS(); err != nil {
		return nil, err
	}
	if err := p.Validate(); err != nil {
		return nil, usageError{fmt.Errorf("--allow: %w", err)}
	}
	return p, nil
}

// parseAllow reads a destination: [PEER][:PORTS][/PROTOCOL].
func parseAllow(word string) (netpolicy.Rule, error) {
	r := netpolicy.Rule{Direction: netpolicy.Egress, Verdict: netpolicy.Allow, Name: word}
	if len(word) > netpolicy.MaxRuleName {
		r.Name = ""
	}
	rest, protocol := word, netpolicy.TCP
	for _, known := range []netpolicy.Protocol{netpolicy.TCP, netpolicy.UDP} {
		if cut, ok := strings.CutSuffix(rest, "/"+string(known)); ok {
			rest, protocol = cut, known
			break
		}
	}
	peer, ports := rest, ""
	if _, err := netip.ParseAddr(rest); err != nil { // an IPv6 address has colons, and no port
		if _, err := netip.ParsePrefix(rest); err != nil {
			if i := strings.LastIndexByte(rest, ':'); i >= 0 {
				peer, ports = rest[:i], rest[i+1:]
				if ports == "" {
					return r, errors.New("a port must follow the colon")
				}
			} else if strings.Trim(rest, "0123456789-") == "" {
				peer, ports = "", rest
			}
		}
	}
	peer = strings.TrimSuffix(strings.TrimPrefix(peer, "["), "]")
	if ports != "" {
		var in netpolicy.PortRange
		if err := in.UnmarshalText([]byte(ports)); err != nil {
			return r, err
		}
		r.Ports = []netpolicy.PortRange{in}
	}
	r.Protocols = []netpolicy.Protocol{protocol}
	var cidr netpolicy.CIDR
	switch err := cidr.UnmarshalText([]byte(peer)); {
	case word == "" || peer == "" && ports == "":
		return r, errors.New("it names nothing: use a name, an address, a CIDR or a port")
	case peer == "":
		r.Groups = []netpolicy.Group{netpolicy.Public}
	case err == nil:
		r.CIDRs = []netpolicy.CIDR{cidr}
		if ports == "" && rest == word {
			r.Protocols = []netpolicy.Protocol{netpolicy.AnyProtocol}
		}
		if ports == "" {
			r.Ports = []netpolicy.PortRange{netpolicy.AnyPort}
		}
	case strings.Contains(peer, "/"):
		if strings.Contains(peer, "://") {
			return r, errors.New("give the name alone, without scheme and path")
		}
		return r, err
	default:
		r.Names = []string{strings.ToLower(peer)}
		if ports == "" {
			r.Ports = []netpolicy.PortRange{{First: 443, Last: 443}}
		}
	}
	return r, nil
}

// resolvConf is where the host says its name servers.
var resolvConf = "/etc/resolv.conf"

// hostDNS returns a resolver that asks the name servers of the host (resolv.conf(5)).
func hostDNS() (*netpolicy.DNS, error) {
	f, err := os.Open(resolvConf)
	if err != nil {
		return nil, fmt.Errorf("looking for the host's name servers: %w: name them in a policy file (--policy)", err)
	}
	defer f.Close()
	d := &netpolicy.DNS{}
	for lines := bufio.NewScanner(f); lines.Scan() && len(d.Upstreams) < netpolicy.MaxUpstreams; {
		words := strings.Fields(lines.Text())
		if len(words) < 2 || words[0] != "nameserver" {
			continue
		}
		if at, err := netip.ParseAddr(words[1]); err == nil && at.Zone() == "" {
			d.Upstreams = append(d.Upstreams, netip.AddrPortFrom(at.Unmap(), 53))
		}
	}
	if len(d.Upstreams) == 0 {
		return nil, fmt.Errorf("%s names no name server: name them in a policy file (--policy)", resolvConf)
	}
	return d, nil
}
