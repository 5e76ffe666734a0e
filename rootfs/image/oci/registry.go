package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sync/errgroup"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// Limits of a build's patience with a registry.
const (
	maxTries    = 4                // of a request that is limited or fails temporarily, and of a layer
	firstPause  = time.Second      // before the second try; doubled each time
	maxPause    = time.Minute      // the most that a registry may ask for
	maxStall    = 2 * time.Minute  // without a byte, also of the headers
	dialTimeout = 30 * time.Second // also for a TLS handshake
	fetchAtOnce = 4                // layers
	maxDrain    = 64 << 10         // bytes read of a discarded answer
	userAgent   = "drowse"
)

// registry is an image of a registry.
type registry struct {
	ref    name.Reference
	puller *remote.Puller
	web    *http.Transport
	pause  func(context.Context, time.Duration) error
}

// sleep waits for d, or until the context ends.
func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// parseReference reads a reference as docker does: debian, ghcr.io/me/app:v1, localhost:5000/app@sha256:...
func parseReference(s string, plainHTTP bool) (name.Reference, error) {
	var o []name.Option
	if plainHTTP {
		o = append(o, name.Insecure)
	}
	return name.ParseReference(s, o...)
}

// FullName returns a reference in full: docker.io/library/debian:latest for debian.
func FullName(ref string) (string, error) {
	r, err := parseReference(ref, false)
	if err != nil {
		return "", err
	}
	return r.Name(), nil
}

// LocalTag returns the tag that an image of a registry has in an image store: the reference with its version, without
// what docker adds to short names. So python, docker.io/library/python and python:latest are python:latest, and
// ghcr.io/me/app:v1 stays as it is. A digest becomes a version: python:sha256-0123...
func LocalTag(ref string) (string, error) {
	r, err := parseReference(ref, false)
	if err != nil {
		return "", err
	}
	repository := r.Context().RegistryStr() + "/" + r.Context().RepositoryStr()
	if r.Context().RegistryStr() == name.DefaultRegistry {
		repository = strings.TrimPrefix(r.Context().RepositoryStr(), "library/")
	}
	version := r.Identifier()
	if d, ok := r.(name.Digest); ok {
		version = strings.ReplaceAll(d.DigestStr(), ":", "-")
	}
	return image.NormalizeTag(repository + ":" + version)
}

// newRegistry prepares access to a reference. Credentials come from docker's configuration ($DOCKER_CONFIG,
// ~/.docker/config.json, its helpers), or podman's. The caller must call Close.
func newRegistry(ref string, plainHTTP bool, pause func(context.Context, time.Duration) error) (*registry, error) {
	if pause == nil {
		pause = sleep
	}
	r := &registry{pause: pause}
	var err error
	if r.ref, err = parseReference(ref, plainHTTP); err != nil {
		return nil, fmt.Errorf("%w %q: %w", image.ErrUnsupportedSource, ref, err)
	}
	r.web = &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: dialTimeout}).DialContext,
		ForceAttemptHTTP2:     true,
		TLSHandshakeTimeout:   dialTimeout,
		ResponseHeaderTimeout: maxStall,
		IdleConnTimeout:       dialTimeout,
		MaxIdleConnsPerHost:   fetchAtOnce,
	}
	r.puller, err = remote.NewPuller(
		remote.WithTransport(&patient{inner: r.web, pause: pause, plainHTTP: plainHTTP, stall: maxStall}),
		remote.WithAuthFromKeychain(authn.DefaultKeychain),
		remote.WithUserAgent(userAgent),
		remote.WithJobs(fetchAtOnce),
		// patient does the retries.
		remote.WithRetryStatusCodes(), remote.WithRetryPredicate(func(error) bool { return false }),
	)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// Close closes idle connections.
func (r *registry) Close() error {
	r.web.CloseIdleConnections()
	return nil
}

// image reads the documents of the image.
func (r *registry) image(ctx context.Context, want v1.Platform) (*manifest, error) {
	top, err := r.puller.Get(ctx, r.ref)
	if err != nil {
		return nil, registryError(ctx, err)
	}
	if d, ok := r.ref.(name.Digest); ok && top.Digest.String() != d.DigestStr() {
		return nil, fmt.Errorf("%w: asked for %s, got %s", image.ErrDigest, d.DigestStr(), top.Digest)
	}
	get := fetcher(func(d v1.Descriptor) ([]byte, error) {
		if d.Digest == top.Digest {
			return top.Manifest, nil
		}
		if d.MediaType.IsIndex() || d.MediaType.IsImage() {
			sub, err := r.puller.Get(ctx, r.ref.Context().Digest(d.Digest.String()))
			if err != nil {
				return nil, registryError(ctx, err)
			}
			return sub.Manifest, nil
		}
		body, err := r.blob(ctx, d)
		if err != nil {
			return nil, err
		}
		defer func() { _ = body.Close() }()                  // only read
		b, err := io.ReadAll(io.LimitReader(body, d.Size+1)) // a document's size has a bound
		if err != nil && int64(len(b)) < d.Size {
			return nil, registryError(ctx, err)
		}
		return b, nil // the caller checks its length and digest
	})
	if top.MediaType.IsSchema1() {
		return nil, fmt.Errorf("%w: it is a manifest of schema 1, which was given up in 2017: push the image again", image.ErrBadManifest)
	}
	return get.image(top.Descriptor, want, nil)
}

// blob opens a blob as the registry sends it. The reader checks its digest too.
func (r *registry) blob(ctx context.Context, d v1.Descriptor) (io.ReadCloser, error) {
	l, err := r.puller.Layer(ctx, r.ref.Context().Digest(d.Digest.String()))
	if err != nil {
		return nil, registryError(ctx, err)
	}
	body, err := l.Compressed()
	if err != nil {
		return nil, registryError(ctx, err)
	}
	return body, nil
}

// fetch puts missing layers into the store, several at the same time, and makes m read them from there. It checks
// each before it enters the store. The lock of shareBlobs must be held.
func (r *registry) fetch(ctx context.Context, m *manifest, s *image.Store, tmp string, most int64, progress func(done, total int64)) error {
	var total int64
	var todo []v1.Descriptor
	seen := map[v1.Hash]int64{}
	for i := range m.layers {
		l := &m.layers[i]
		h, err := v1.NewHash(l.Digest)
		if err != nil {
			return fmt.Errorf("%w: digest %.100q: %w", image.ErrBadManifest, l.Digest, err)
		}
		l.Open = func(context.Context) (io.ReadCloser, error) { return layers.OpenRegular(blobPath(s, l.Digest)) }
		if size, ok := seen[h]; ok {
			if size != l.Size {
				return fmt.Errorf("%w: %s has %d and %d bytes", image.ErrBadManifest, h, size, l.Size)
			}
			continue
		}
		seen[h] = l.Size
		if hasBlob(s, l.Digest, l.Size) {
			continue
		}
		if total += l.Size; l.Size > most || total > most {
			return fmt.Errorf("%w: its layers have more than %d bytes; raise MaxBytes (--max-size) to take it", image.ErrTooLarge, most)
		}
		todo = append(todo, v1.Descriptor{Digest: h, Size: l.Size})
	}
	if len(todo) == 0 {
		return nil
	}
	var done atomic.Int64
	tell := func(n int64) { progress(done.Add(n), total) }
	tell(0)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(fetchAtOnce)
	for _, d := range todo {
		g.Go(func() error { return r.fetchOne(ctx, d, s, tmp, tell) })
	}
	return g.Wait()
}

// fetchOne gets one layer. It retries after a broken connection and after wrong content.
func (r *registry) fetchOne(ctx context.Context, d v1.Descriptor, s *image.Store, tmp string, tell func(int64)) error {
	wait := firstPause
	for try := 1; ; try++ {
		var got int64
		err := putBlob(s, d.Digest.String(), d.Size, tmp, func(w io.Writer) error {
			return r.copyBlob(ctx, d, w, func(n int64) { got += n; tell(n) })
		})
		if err == nil {
			return nil
		}
		tell(-got)
		again := errors.Is(err, image.ErrRegistry) || errors.Is(err, image.ErrDigest)
		if !again || try == maxTries || ctx.Err() != nil {
			return fmt.Errorf("fetch layer %s: %w", d.Digest, err)
		}
		if err := r.pause(ctx, wait); err != nil {
			return err
		}
		wait *= 2
	}
}

func (r *registry) copyBlob(ctx context.Context, d v1.Descriptor, w io.Writer, tell func(int64)) error {
	body, err := r.blob(ctx, d)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }() // only read
	buf := make([]byte, 256<<10)
	for left := d.Size; ; {
		n, err := body.Read(buf)
		if left -= int64(n); left < 0 {
			return fmt.Errorf("%w: it is longer than the %d bytes that its descriptor says", image.ErrDigest, d.Size)
		}
		if _, werr := w.Write(buf[:n]); werr != nil {
			return werr
		}
		tell(int64(n))
		if errors.Is(err, io.EOF) {
			return nil // the caller checks the content
		}
		if err != nil {
			// The registry's reader also checks the digest, and reports a mismatch as an error. All bytes have
			// come then.
			if left == 0 {
				return nil
			}
			return registryError(ctx, err)
		}
	}
}

// registryError converts an error of a registry to one of this package.
func registryError(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	for _, known := range []error{image.ErrRateLimited, image.ErrRegistry, image.ErrDigest, image.ErrBadManifest} {
		if errors.Is(err, known) {
			return err
		}
	}
	var answer *transport.Error
	if errors.As(err, &answer) {
		switch answer.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden:
			return fmt.Errorf("%w: %w; log in with `docker login`, or name its configuration in $DOCKER_CONFIG (registries answer so, too, "+
				"when there is no such repository)", image.ErrAuth, err)
		case http.StatusNotFound:
			return fmt.Errorf("%w: %w", image.ErrNoSource, err)
		case http.StatusTooManyRequests:
			return fmt.Errorf("%w: %w", image.ErrRateLimited, err)
		}
	}
	return fmt.Errorf("%w: %w", image.ErrRegistry, err)
}

// patient retries requests that a registry has postponed (RFC 9110, 10.2.3, Retry-After; RFC 6585, 429) or
// temporarily failed to answer. It bounds answers, and aborts those that stall. Unless plainHTTP is set, it sends
// no request without TLS except to this host, whatever a registry or a redirect says.
type patient struct {
	inner     http.RoundTripper
	pause     func(context.Context, time.Duration) error
	plainHTTP bool
	stall     time.Duration
}

// RoundTrip implements http.RoundTripper.
func (p *patient) RoundTrip(req *http.Request) (*http.Response, error) {
	withBody := req.Body != nil && req.Body != http.NoBody // only in token exchanges
	if req.URL.Scheme != "https" && !p.plainHTTP && !onThisHost(req.URL.Hostname()) {
		if withBody {
			_ = req.Body.Close() // as RoundTripper requires
		}
		return nil, fmt.Errorf("%w: %s would be asked without TLS; use --plain-http (PlainHTTP) if its network can be trusted", image.ErrRegistry, req.URL.Host)
	}
	wait := firstPause
	for try := 1; ; try++ {
		resp, err := p.once(req)
		if err != nil {
			return nil, err
		}
		if !retryable(resp.StatusCode) || withBody {
			return resp, nil
		}
		asked, ok := retryAfter(resp.Header.Get("Retry-After"), time.Now())
		if ok && asked > maxPause {
			drain(resp)
			return nil, fmt.Errorf("%w: %s wants to be asked again in %v; log in for a higher limit, or come back then",
				image.ErrRateLimited, req.URL.Host, asked.Round(time.Second))
		}
		if try == maxTries {
			return resp, nil // the caller reads the error in it
		}
		drain(resp)
		if !ok {
			asked = wait
		}
		if err := p.pause(req.Context(), asked); err != nil {
			return nil, err
		}
		wait *= 2
	}
}

// onThisHost reports whether a host name means this host (RFC 6761, 6.3, and loopback addresses).
func onThisHost(name string) bool {
	if name == "localhost" || strings.HasSuffix(name, ".localhost") {
		return true
	}
	ip := net.ParseIP(name)
	return ip != nil && ip.IsLoopback()
}

// once sends one request.
func (p *patient) once(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := p.inner.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	// The kind of answer follows from the first request, before redirects.
	first := req
	for first.Response != nil && first.Response.Request != nil {
		first = first.Response.Request
	}
	kind, last := path.Base(path.Dir(first.URL.Path)), path.Base(first.URL.Path)
	a := &answer{ReadCloser: resp.Body, ctx: ctx, cancel: cancel, stall: p.stall, left: maxManifestBytes}
	switch {
	case req.Method != http.MethodGet || resp.StatusCode != http.StatusOK:
	case kind == "blobs":
		a.left = math.MaxInt64 // the reader knows its length
	case kind == "manifests":
		a.v, _ = layers.NewVerifier(last) // for a tag there is no digest to compare
	}
	resp.Body = a
	return resp, nil
}

// answer is the body of an answer, with its limits.
type answer struct {
	io.ReadCloser
	ctx    context.Context // of the request
	cancel context.CancelCauseFunc
	stall  time.Duration
	left   int64
	v      *layers.Verifier // nil: no digest to compare
}

func (a *answer) Read(p []byte) (int, error) {
	stall := time.AfterFunc(a.stall, func() { a.cancel(fmt.Errorf("%w: no byte has come for %v", image.ErrRegistry, a.stall)) })
	n, err := a.ReadCloser.Read(p)
	if !stall.Stop() && err != nil && !errors.Is(err, io.EOF) {
		err = context.Cause(a.ctx)
	}
	if a.left -= int64(n); a.left < 0 {
		return 0, fmt.Errorf("%w: an answer of the registry has more than %d bytes", image.ErrBadManifest, maxManifestBytes)
	}
	if a.v != nil {
		a.v.Write(p[:n])
		if errors.Is(err, io.EOF) {
			if derr := a.v.Check(); derr != nil {
				return n, derr
			}
		}
	}
	return n, err
}

// Close discards the rest.
func (a *answer) Close() error {
	err := a.ReadCloser.Close()
	a.cancel(nil)
	return err
}

func retryable(status int) bool {
	return slices.Contains([]int{
		http.StatusTooManyRequests, http.StatusRequestTimeout, http.StatusInternalServerError, http.StatusBadGateway,
		http.StatusServiceUnavailable, http.StatusGatewayTimeout,
	}, status)
}

// drain reads and discards an answer, so that its connection can be used again.
func drain(resp *http.Response) {
	_, _ = io.CopyN(io.Discard, resp.Body, maxDrain)
	_ = resp.Body.Close()
}

// retryAfter reads a Retry-After header: seconds, or a date.
func retryAfter(s string, now time.Time) (time.Duration, bool) {
	if s == "" {
		return 0, false
	}
	if n, err := strconv.ParseUint(s, 10, 31); err == nil {
		return time.Duration(n) * time.Second, true
	}
	if t, err := http.ParseTime(s); err == nil {
		return max(t.Sub(now), 0), true
	}
	return 0, false
}
