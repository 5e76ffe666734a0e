//go:build linux

package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/supervisor"
)

// e2bFlags say how "drowse serve" serves E2B's wire.
type e2bFlags struct {
	listen, domain, cert, key string
	plain                     bool
	templates                 []string
}

// e2bExpiry is how often expired sandboxes are looked for: their clients count in seconds.
const e2bExpiry = time.Second

func (f *e2bFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.listen, "e2b", "", "serve E2B's SDKs on this HOST:PORT, to callers with a key (docs/guides/e2b.md)")
	fl.StringVar(&f.domain, "e2b-domain", "", "domain of the hosts {port}-{sandbox}.DOMAIN that --e2b serves, with :PORT unless it is 443")
	fl.StringArrayVar(&f.templates, "e2b-template", nil, "NAME=IMAGE or NAME=snapshot:ID of a template, for all keys; other templates are images by their own names; repeatable")
	fl.StringVar(&f.cert, "e2b-cert", "", "certificate for --e2b, also of *.DOMAIN, PEM; read again when it changes")
	fl.StringVar(&f.key, "e2b-key", "", "key of --e2b-cert, PEM")
	fl.BoolVar(&f.plain, "e2b-no-tls", false, "allow --e2b without TLS on an address that others reach, because something else encrypts")
}

func (f *e2bFlags) check() error {
	switch {
	case f.listen == "":
		if f.domain != "" || f.cert != "" || f.key != "" || f.plain || len(f.templates) > 0 {
			return usageError{errors.New("the flags --e2b-... go with --e2b HOST:PORT")}
		}
	case (f.cert == "") != (f.key == ""):
		return usageError{errors.New("--e2b-cert goes with --e2b-key")}
	case f.cert != "" && f.plain:
		return usageError{errors.New("--e2b-no-tls does not go with a certificate")}
	}
	for _, t := range f.templates {
		if name, image, ok := strings.Cut(t, "="); !ok || name == "" || image == "" {
			return usageError{fmt.Errorf("--e2b-template %q: use NAME=IMAGE or NAME=snapshot:ID", t)}
		}
	}
	return nil
}

// open listens for E2B's clients; serve serves them until its context ends. passed gets what serves them for other
// hosts. Without --e2b, serve is nil.
func (f *e2bFlags) open(a *app, of *member, web *apiFlags, o *supervisor.Options, passed map[string]http.Handler) (serve func(context.Context) error, err error) {
	s := of.host
	if f.listen == "" {
		return nil, nil
	}
	tokens := tokensOf(web.tokens, s)
	if all, err := tokens.Read(); err != nil {
		return nil, err
	} else if len(all) == 0 && web.tcp.Identities == nil {
		return nil, usageError{errors.New("nobody could use --e2b: make a key with `drowse token create --e2b --scope write NAME`")}
	}
	servers, err := hostDNS()
	if err != nil {
		a.log.Warn("sandboxes of E2B's clients cannot resolve names", "cause", err)
	}
	options := e2b.Options{
		Host: s, Tokens: tokens, Identities: web.tcp.Identities, Domain: f.domain, Templates: map[string]string{}, Network: mayHaveNetworks(), DNS: servers, Peers: of.peers, Cluster: of.list, Log: a.log,
		OwnersPrivate: web.private,
	}
	options.Pull = func(ctx context.Context, ref string) error {
		images, err := image.OpenStore(s.State.ImageDir())
		if err != nil {
			return err
		}
		_, err = a.pull(ctx, images, ref, pullFlags{})
		return err
	}
	for _, t := range f.templates {
		name, from, _ := strings.Cut(t, "=")
		options.Templates[name] = from
	}
	var c *tls.Config
	if f.cert != "" {
		if c, err = gateway.Certificates(f.cert, f.key, a.log); err != nil {
			return nil, usageError{err}
		}
	}
	server, err := e2b.New(options)
	if err != nil {
		return nil, usageError{err}
	}
	l, err := gateway.Listen(f.listen, c != nil, f.plain)
	if err != nil {
		return nil, errors.Join(usageError{err}, server.Close())
	}
	if !options.Network {
		a.log.Warn("sandboxes of E2B's clients have no network: this process may not make TAP devices")
	}
	a.log.Info("answering E2B's clients", "at", l.Addr().String(), "tls", c != nil, "domain", f.domain)
	o.PruneEvery = e2bExpiry
	passed[e2b.PeerService] = server
	return func(ctx context.Context) error { return server.Serve(ctx, l, c) }, nil
}
