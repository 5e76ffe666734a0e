// Command drowse-controller serves agent-sandbox's objects of class drowse: package controller.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	kube "sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/drowse-vm/drowse/kubernetes/controller"
)

func main() {
	ctrl.SetLogger(logr.FromSlogHandler(slog.NewTextHandler(os.Stderr, nil)))
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "drowse-controller:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	var o controller.Options
	f := controller.Fleet{}
	port := flag.Int("port", 7300, "port of `drowse serve` at the nodes' internal addresses")
	token := flag.String("token-file", "/etc/drowse/token", "file with the token that nodes are shown: scopes read and create, no owner. Beside it, a file with a node's name is for that node alone")
	ca := flag.String("ca-file", "/etc/drowse/ca.crt", "certificates that nodes' certificates are checked against")
	name := flag.String("server-name", "drowse", "the name in nodes' certificates")
	plain := flag.Bool("no-tls", false, "nodes are asked without TLS: something else encrypts")
	lease := flag.String("lease-namespace", "", "namespace of the lease by which one of several controllers works; empty: the pod's own")
	probe := flag.String("health", ":8081", "address of /healthz and /readyz")
	metrics := flag.String("metrics", "0", "address of /metrics; 0 is none")
	flag.StringVar(&o.ClusterID, "cluster-id", "", "what tells this cluster's VMs from others at the same nodes; empty: the UID of the namespace kube-system")
	flag.BoolVar(&o.AllowPrivate, "allow-private", false, "policies of sandboxes may open private addresses and the nodes: NetworkPolicies do not see a VM's packets")
	flag.BoolVar(&o.Durable, "durable", true, "nodes share a store (serve --cluster): a sandbox sleeps in it, and any node wakes it")
	flag.StringVar(&o.PauseImage, "pause-image", "registry.k8s.io/pause:3.10", "image of reservations, which do nothing")
	flag.DurationVar(&o.CheckEvery, "check-every", time.Minute, "how often an awake sandbox is looked at")
	flag.DurationVar(&o.CallTime, "call-time", 3*time.Minute, "the most that a node may take for a start, sleep or removal")
	flag.Parse()

	f.Port = *port
	f.Token = func(node string) (string, error) { return tokenOf(*token, node) }
	if !*plain {
		pem, err := os.ReadFile(*ca)
		if err != nil {
			return err
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(pem) {
			return fmt.Errorf("%s has no certificate", *ca)
		}
		f.HTTP = &http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: *name, MinVersion: tls.VersionTLS13},
			DialContext:     (&net.Dialer{Timeout: 3 * time.Second}).DialContext, TLSHandshakeTimeout: 3 * time.Second,
			ForceAttemptHTTP2: true, MaxIdleConnsPerHost: 16, IdleConnTimeout: time.Minute,
		}}
	}
	scheme, err := controller.Scheme()
	if err != nil {
		return err
	}
	cfg, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	cfg.QPS = -1 // the API server's priorities bound it
	if o.ClusterID == "" {
		c, err := kube.New(cfg, kube.Options{Scheme: scheme})
		if err != nil {
			return err
		}
		var system corev1.Namespace
		if err := c.Get(ctx, kube.ObjectKey{Name: metav1.NamespaceSystem}, &system); err != nil {
			return fmt.Errorf("reading the namespace kube-system for --cluster-id: %w", err)
		}
		o.ClusterID = string(system.UID)
	}
	m, err := ctrl.NewManager(cfg, ctrl.Options{
		Scheme: scheme, Cache: controller.Cache(), HealthProbeBindAddress: *probe, Metrics: server.Options{BindAddress: *metrics},
		LeaderElection: true, LeaderElectionID: "drowse-controller", LeaderElectionNamespace: *lease,
	})
	if err != nil {
		return err
	}
	if err := errors.Join(controller.Setup(ctx, m, &f, o), m.AddHealthzCheck("ping", healthz.Ping), m.AddReadyzCheck("ping", healthz.Ping)); err != nil {
		return err
	}
	return m.Start(ctx)
}

// tokenOf returns the token for a node: each time, as it may be replaced.
func tokenOf(file, node string) (string, error) {
	text, err := os.ReadFile(filepath.Join(filepath.Dir(file), filepath.Base(node)))
	if errors.Is(err, fs.ErrNotExist) {
		text, err = os.ReadFile(file)
	}
	return string(bytes.TrimSpace(text)), err
}
