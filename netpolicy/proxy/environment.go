package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/netpolicy"
)

// Files with the certificates that a guest must trust. Both are in its memory (/run), not on its disk.
const (
	// AuthorityFile has the proxy's certificate alone.
	AuthorityFile = "/run/drowse/proxy-ca.pem"
	// TrustFile has that certificate and all others that the guest trusts.
	TrustFile = "/run/drowse/ca-certificates.pem"
)

// Environment returns what programs in a guest need to know of their proxy, as KEY=VALUE: its address and the
// destinations to reach without it, certificate files, and the placeholders of secrets. It is nil if the policy
// has no proxy. others are ranges of addresses that the proxy does not connect to.
func Environment(p *netpolicy.Policy, id *Identity, others ...netip.Prefix) ([]string, error) {
	if !p.ProxyOn() {
		return nil, nil
	}
	gateway := netpolicy.TheWire.Gateway4
	direct := []string{"localhost", "127.0.0.1", "::1", gateway.String()}
	for _, o := range others {
		direct = append(direct, o.String())
	}
	address := fmt.Sprintf("http://%v:%d", gateway, netpolicy.ProxyPort)
	var env []string
	proxies, all, authority := netpolicy.ProxyVariables()
	for _, name := range proxies {
		value := address
		if name == "no_proxy" {
			value = strings.Join(direct, ",")
		}
		env = append(env, name+"="+value, strings.ToUpper(name)+"="+value)
	}
	for _, name := range all {
		env = append(env, name+"="+TrustFile)
	}
	for _, name := range authority {
		env = append(env, name+"="+AuthorityFile)
	}
	var secrets []string
	for _, i := range p.Proxy.Inject {
		if slices.Contains(secrets, i.Secret) {
			continue
		}
		secrets = append(secrets, i.Secret)
		text, err := id.Placeholder(i.Secret)
		if err != nil {
			return nil, err
		}
		env = append(env, i.Secret+"="+text)
	}
	return env, nil
}
