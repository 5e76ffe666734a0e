//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"maps"
	"net/http"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// gatewayFlags say how "drowse serve" serves a gateway.
type gatewayFlags struct {
	domain, listen, raw, cert, key, email, directory string
	acme, plain                                      bool
	connsOf                                          int
}

func (f *gatewayFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.domain, "gateway", "", "carry connections to {port}-{sandbox}.DOMAIN to sandboxes, which they wake (docs/guides/access.md)")
	fl.StringVar(&f.listen, "gateway-listen", "", "HOST:PORT for HTTP of --gateway")
	fl.StringVar(&f.raw, "gateway-tcp", "", "HOST:PORT for other protocols in TLS, by server name")
	fl.StringVar(&f.cert, "gateway-cert", "", "certificate of *.DOMAIN and DOMAIN, PEM; read again when it changes")
	fl.StringVar(&f.key, "gateway-key", "", "key of --gateway-cert, PEM")
	fl.BoolVar(&f.acme, "gateway-acme", false, "get certificates of DOMAIN and public ports by ACME, and accept the authority's terms")
	fl.StringVar(&f.email, "gateway-acme-email", "", "address for messages of the ACME authority")
	fl.StringVar(&f.directory, "gateway-acme-url", "", "directory of the ACME authority (default Let's Encrypt)")
	fl.BoolVar(&f.plain, "gateway-no-tls", false, "allow --gateway-listen without TLS on an address that others reach, because something else encrypts")
	fl.IntVar(&f.connsOf, "gateway-conns-per-address", 0, "simultaneous connections of one client address (default half of all)")
}

func (f *gatewayFlags) check() error {
	switch encrypted := f.cert != "" || f.acme; {
	case f.domain == "":
		if *f != (gatewayFlags{}) {
			return usageError{errors.New("the flags --gateway-... go with --gateway DOMAIN")}
		}
	case !gateway.ValidDomain(f.domain):
		return usageError{fmt.Errorf("--gateway %q: use a domain name in lower case", f.domain)}
	case f.listen == "" && f.raw == "":
		return usageError{errors.New("--gateway needs --gateway-listen or --gateway-tcp")}
	case (f.cert == "") != (f.key == ""):
		return usageError{errors.New("--gateway-cert goes with --gateway-key")}
	case f.acme && f.cert != "":
		return usageError{errors.New("--gateway-acme does not go with --gateway-cert")}
	case f.acme && f.listen == "":
		return usageError{errors.New("--gateway-acme needs --gateway-listen, where the authority checks names")}
	case !f.acme && (f.email != "" || f.directory != ""):
		return usageError{errors.New("--gateway-acme-email and --gateway-acme-url go with --gateway-acme")}
	case encrypted && f.plain:
		return usageError{errors.New("--gateway-no-tls does not go with certificates")}
	case f.connsOf < 0:
		return usageError{fmt.Errorf("%d connections of one address: use 1 or more", f.connsOf)}
	}
	return nil
}

// open opens the gateway; serve serves it until its context ends. passed gets what serves it for other hosts. Without
// --gateway, serve is nil.
func (f *gatewayFlags) open(a *app, of *member, passed map[string]http.Handler) (serve func(context.Context) error, err error) {
	if f.domain == "" {
		return nil, nil
	}
	// A transport of net/http reports a guest's unasked answers there: guests must not fill the log.
	log.SetOutput(slog.NewLogLogger(a.log.Handler(), slog.LevelDebug).Writer())
	s, names := of.host, gateway.Names{Domain: f.domain}
	l := gateway.Listeners{ConnsOf: f.connsOf}
	defer func() {
		if err == nil {
			return
		}
		if l.HTTP != nil {
			err = errors.Join(err, l.HTTP.Close())
		}
		if errors.Is(err, gateway.ErrListen) {
			err = usageError{err}
		}
	}()
	switch {
	case f.acme:
		l.TLS = gateway.ACME(s, gateway.ACMEOptions{
			Names: names, Dir: filepath.Join(s.State.Dir(), "acme"), Email: f.email, Directory: f.directory,
		})
	case f.cert != "":
		if l.TLS, err = gateway.Certificates(f.cert, f.key, a.log); err != nil {
			return nil, err
		}
	}
	g, err := gateway.New(s, gateway.Options{Resolver: names, Peers: of.peers, Log: a.log})
	if err != nil {
		return nil, err
	}
	maps.Copy(passed, g.PeerHandlers())
	if f.listen != "" {
		if l.HTTP, err = gateway.Listen(f.listen, l.TLS != nil, f.plain); err != nil {
			return nil, err
		}
		a.log.Info("gateway", "domain", f.domain, "at", l.HTTP.Addr().String(), "tls", l.TLS != nil)
	}
	if f.raw != "" {
		if l.Raw, err = gateway.Listen(f.raw, true, false); err != nil {
			return nil, err
		}
		a.log.Info("gateway of raw connections", "domain", f.domain, "at", l.Raw.Addr().String())
	}
	return func(ctx context.Context) error { return g.Serve(ctx, l) }, nil
}

// gatewayAnswer is the output of "drowse gateway".
type gatewayAnswer struct {
	Sandbox string `json:"sandbox"`
	spec.Gateway
	Token string `json:"token,omitempty"`
}

func (a *app) gatewayCommand() *cobra.Command {
	var (
		g                   spec.Gateway
		public, tls         []uint
		closed, show, renew bool
	)
	cmd := &cobra.Command{
		Use: "gateway NAME", Short: "Show or set whom the gateway lets in to a sandbox's ports", Args: cobra.ExactArgs(1),
		Long: `Show or set whom the gateway of "drowse serve --gateway" lets in to a sandbox's ports. A new
sandbox lets in only requests with its token. Each flag replaces what it names; the rest stays.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			given, fl := map[string]bool{}, cmd.Flags()
			for _, name := range []string{"public", "all-public", "closed", "guest-tls", "host-header", "idle-streams", "new-token"} {
				given[name] = fl.Changed(name)
			}
			if closed && (given["public"] || g.AllPublic) {
				return usageError{errors.New("--closed does not go with --public and --all-public")}
			}
			for into, list := range map[*[]uint16][]uint{&g.PublicPorts: public, &g.GuestTLS: tls} {
				for _, p := range list {
					if p == 0 || p > 65535 {
						return usageError{fmt.Errorf("port %d: use 1 to 65535", p)}
					}
					*into = append(*into, uint16(p))
				}
				slices.Sort(*into)
				*into = slices.Compact(*into)
			}
			var m spec.Metadata
			var err error
			if slices.Contains(slices.Collect(maps.Values(given)), true) {
				m, err = s.State.SetMetadata(cmd.Context(), args[0], func(m *spec.Metadata, unreadable error) error {
					to := &m.Gateway
					if given["public"] {
						to.PublicPorts = g.PublicPorts
					}
					if given["all-public"] {
						to.AllPublic = g.AllPublic
					}
					if closed {
						to.PublicPorts, to.AllPublic = nil, false
					}
					if given["guest-tls"] {
						to.GuestTLS = g.GuestTLS
					}
					if given["host-header"] {
						to.Host = g.Host
					}
					if given["idle-streams"] {
						to.IdleStreams = g.IdleStreams
					}
					if renew {
						to.Tokens++
					}
					return unreadable
				})
			} else {
				m, err = s.State.Metadata(args[0])
			}
			if err != nil {
				return err
			}
			out := gatewayAnswer{Sandbox: args[0], Gateway: m.Gateway}
			if show || renew {
				if out.Token, err = s.State.GatewayToken(args[0], m.Gateway); err != nil {
					return err
				}
			}
			return a.print(out, func(w io.Writer) {
				if out.Token != "" {
					fmt.Fprintln(w, out.Token)
					return
				}
				open := "none"
				if len(out.PublicPorts) > 0 {
					open = fmt.Sprint(out.PublicPorts)
				}
				if out.AllPublic {
					open = "all"
				}
				fmt.Fprintf(w, "public ports   %s\nTLS in guest   %v\nHost           %s\nidle streams   %v\n", open, out.GuestTLS, out.Host, out.IdleStreams)
			})
		}),
	}
	fl := cmd.Flags()
	fl.UintSliceVar(&public, "public", nil, "ports that anyone may use, as 80,3000")
	fl.BoolVar(&g.AllPublic, "all-public", false, "anyone may use every port")
	fl.BoolVar(&closed, "closed", false, "no port is public any more")
	fl.UintSliceVar(&tls, "guest-tls", nil, "ports whose raw connections are passed on encrypted")
	fl.StringVar(&g.Host, "host-header", "", "Host of the requests that the guest sees; ${PORT} in it is the port")
	fl.BoolVar(&g.IdleStreams, "idle-streams", false, "let the sandbox sleep although connections are open, if they are quiet")
	fl.BoolVar(&show, "token", false, "print the sandbox's token")
	fl.BoolVar(&renew, "new-token", false, "print a new token; the old one is invalid from then on")
	for _, ports := range []string{"public", "guest-tls"} {
		fl.Lookup(ports).DefValue = "" // "[]" tells nobody anything
	}
	return cmd
}
