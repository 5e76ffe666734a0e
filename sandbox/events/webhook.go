//go:build linux

package events

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/internal/wait"
)

// Headers of a delivery.
const (
	// SignatureHeader is "v1=" and, in hex digits, the HMAC-SHA256 (RFC 2104) with the webhook's secret of: the
	// value of TimestampHeader, a dot, and the body.
	SignatureHeader = "Drowse-Signature"
	// TimestampHeader is the time of this attempt, in seconds since 1970.
	TimestampHeader = "Drowse-Timestamp"
	// IDHeader is the event's id, which is the same in all attempts.
	IDHeader = "Drowse-Event-Id"
)

// Limits of webhooks.
const (
	MaxWebhooks   = 16
	MinSecret     = 16 // bytes
	MaxSecret     = 4 << 10
	deliveryTime  = 10 * time.Second // for one attempt
	firstPause    = time.Second      // after the first failure, and doubled after each further one
	longestPause  = 5 * time.Minute
	maxAnswer     = 4 << 10 // bytes of an answer that are read
	saveIdleEvery = 10 * time.Second
)

// ErrDelivered means that another process delivers to a webhook.
var ErrDelivered = errors.New("another process delivers events to this webhook")

// Webhook is a receiver of events. It gets one POST per event, with the event as JSON, in order. Each is repeated
// until the answer has a status of 200 to 299. An event may come more than once. None is left out: an event of
// type Lost replaces events that were deleted before their delivery.
type Webhook struct {
	// URL is https, or http to an address of this host (127.0.0.0/8, ::1, localhost).
	URL    string
	Secret []byte
	Filter Filter
}

// Check returns an ErrInvalid for a webhook that cannot be used.
func (w Webhook) Check() error {
	u, err := url.Parse(w.URL)
	switch {
	case err != nil:
		// Without err, which would show the address: it may have a token.
		return fmt.Errorf("%w: the webhook's address is no URL", ErrInvalid)
	case u.User != nil:
		return fmt.Errorf("%w: the webhook %s has a user in its address: deliveries are signed instead", ErrInvalid, u.Host)
	case u.Host == "" || u.Scheme != "https" && !(u.Scheme == "http" && loopback(u.Hostname())):
		return fmt.Errorf("%w: the webhook %s: use https, or http to this host itself", ErrInvalid, u.Host)
	case len(w.Secret) < MinSecret || len(w.Secret) > MaxSecret:
		return fmt.Errorf("%w: the secret of the webhook %s has %d bytes: use %d to %d", ErrInvalid, u.Host, len(w.Secret), MinSecret, MaxSecret)
	}
	return w.Filter.Check()
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// Sign returns the value of SignatureHeader.
func Sign(secret []byte, timestamp string, body []byte) string {
	m := hmac.New(sha256.New, secret)
	m.Write([]byte(timestamp + "."))
	m.Write(body)
	return "v1=" + hex.EncodeToString(m.Sum(nil))
}

// ReadSecret reads a webhook's secret from a file that only its owner may read. A line end after the secret is not
// part of it.
func ReadSecret(path string) ([]byte, error) {
	data, err := osfile.ReadPrivate(path, MaxSecret+3)
	if errors.Is(err, osfile.ErrShared) {
		err = fmt.Errorf("%w: %w: use chmod 600", ErrInvalid, err)
	}
	if err != nil {
		return nil, fmt.Errorf("reading a webhook's secret: %w", err)
	}
	return bytes.TrimSuffix(bytes.TrimSuffix(data, []byte("\n")), []byte("\r")), nil
}

// maxConfig is the most bytes of a file of webhooks.
const maxConfig = 64 << 10

// ReadWebhooks reads a file with a JSON array of webhooks: url, secret_file, and optionally types, sandbox, owner
// and tags.
func ReadWebhooks(path string) ([]Webhook, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading webhooks: %w", err)
	}
	defer f.Close()
	var docs []struct {
		URL        string   `json:"url"`
		SecretFile string   `json:"secret_file"`
		Types      []string `json:"types"`
		Sandbox    string   `json:"sandbox"`
		Owner      string   `json:"owner"`
		Tags       []string `json:"tags"`
	}
	d := json.NewDecoder(io.LimitReader(f, maxConfig))
	d.DisallowUnknownFields()
	if err := d.Decode(&docs); err != nil {
		return nil, fmt.Errorf("reading webhooks from %s: %w: %w", path, ErrInvalid, err)
	}
	var out []Webhook
	for _, doc := range docs {
		secret, err := ReadSecret(doc.SecretFile)
		if err != nil {
			return nil, err
		}
		out = append(out, Webhook{doc.URL, secret, Filter{doc.Types, doc.Sandbox, doc.Owner, doc.Tags}})
	}
	return out, nil
}

// Delivery delivers events to one webhook.
type Delivery struct {
	Journal *Journal
	Webhook Webhook
	// Dir is where the webhook's position in the journal is stored durably.
	Dir string
	// Log gets failures; nil discards them.
	Log *slog.Logger

	// for tests
	client  *http.Client
	pause   time.Duration
	timeout time.Duration
}

// progress is the stored position of a webhook.
type progress struct {
	Version int    `json:"version"`
	Cursor  uint64 `json:"cursor"`
}

// path returns the file with the progress. Its name has no address, since that may have a token.
func (d *Delivery) path() string {
	sum := sha256.Sum256([]byte(d.Webhook.URL))
	return filepath.Join(d.Dir, hex.EncodeToString(sum[:8]))
}

// Run delivers until ctx ends. A new webhook begins with events from now on. An error other than the context's is
// ErrInvalid, ErrDelivered, or one of files.
func (d *Delivery) Run(ctx context.Context) error {
	if err := d.Webhook.Check(); err != nil {
		return err
	}
	u, _ := url.Parse(d.Webhook.URL) // checked
	log := d.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	log = log.With("webhook", u.Host)
	if err := os.MkdirAll(d.Dir, 0o700); err != nil {
		return fmt.Errorf("delivering events to %s: %w", u.Host, err)
	}
	lock, err := osfile.TryOpenLocked(d.path()+".lock", os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
	if errors.Is(err, osfile.ErrLocked) {
		err = ErrDelivered
	}
	if err != nil {
		return fmt.Errorf("delivering events to %s: %w", u.Host, err)
	}
	defer lock.Close()
	at, err := d.load()
	if err != nil {
		return fmt.Errorf("delivering events to %s: %w: remove %s to begin with what happens from now on", u.Host, err, d.path())
	}
	client := d.client
	if client == nil {
		t := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxIdleConns: 1, MaxResponseHeaderBytes: 16 << 10, IdleConnTimeout: time.Minute}
		defer t.CloseIdleConnections()
		client = &http.Client{Transport: t}
	}
	once := *client
	once.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	saved := time.Now()
	save := func(cursor uint64) {
		// An unsaved cursor means repeated events after a restart, which are allowed.
		if err := d.save(cursor); err != nil {
			log.Warn("it is not kept which events were delivered", "error", err)
		}
		at, saved = cursor, time.Now()
	}
	return d.Journal.Follow(ctx, ReadOptions{Since: at, Filter: d.Webhook.Filter, Idle: func(cursor uint64) error {
		if cursor != at && time.Since(saved) >= saveIdleEvery {
			save(cursor) // so that events outside its filter are not read again
		}
		return nil
	}}, func(e Event) error {
		pause := d.pause
		if pause == 0 {
			pause = firstPause
		}
		for n := 1; ; n++ {
			err := d.deliver(ctx, &once, e)
			if err == nil {
				save(e.Cursor)
				return nil
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			log.Warn("an event was not delivered", "event", e.ID, "type", string(e.Type), "attempt", n, "again_in", pause, "error", err)
			if wait.For(ctx, pause/2+rand.N(pause/2+1)) != nil {
				return ctx.Err()
			}
			pause = min(2*pause, longestPause)
		}
	})
}

// deliver makes one attempt.
func (d *Delivery) deliver(ctx context.Context, client *http.Client, e Event) error {
	limit := d.timeout
	if limit == 0 {
		limit = deliveryTime
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	body, err := json.Marshal(e)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.Webhook.URL, bytes.NewReader(body))
	if err != nil {
		return errors.New("the request cannot be made")
	}
	stamp := strconv.FormatInt(time.Now().Unix(), 10)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "drowse")
	req.Header.Set(TimestampHeader, stamp)
	req.Header.Set(SignatureHeader, Sign(d.Webhook.Secret, stamp, body))
	id := e.ID
	if id == "" {
		id = "lost-" + strconv.FormatUint(e.Cursor, 10)
	}
	req.Header.Set(IDHeader, id)
	resp, err := client.Do(req)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // without the address
		}
		return err
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer)
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("it answered %d", resp.StatusCode)
	}
	return nil
}

func (d *Delivery) load() (uint64, error) {
	data, err := os.ReadFile(d.path())
	if errors.Is(err, fs.ErrNotExist) {
		newest, err := d.Journal.Newest()
		if err != nil {
			return 0, err
		}
		return newest, d.save(newest)
	}
	if err != nil {
		return 0, err
	}
	var p progress
	if err := json.Unmarshal(data, &p); err != nil || p.Version != 1 {
		return 0, fmt.Errorf("%w: %s is damaged, or of another version", ErrInvalid, d.path())
	}
	return p.Cursor, nil
}

// save replaces the progress so that the old or the new one exists after a crash at any instant.
func (d *Delivery) save(cursor uint64) error {
	data, err := json.Marshal(progress{1, cursor})
	if err != nil {
		return err
	}
	return osfile.WriteFile(d.path(), append(data, '\n'), 0o600)
}

// DeliverAll delivers to several webhooks until ctx ends, and returns when all have ended. An error ends all.
func DeliverAll(ctx context.Context, j *Journal, dir string, hooks []Webhook, log *slog.Logger) error {
	if len(hooks) > MaxWebhooks {
		return fmt.Errorf("%w: %d webhooks: use %d at most", ErrInvalid, len(hooks), MaxWebhooks)
	}
	seen := map[string]bool{}
	for _, w := range hooks {
		if err := w.Check(); err != nil {
			return err
		}
		if seen[w.URL] {
			return fmt.Errorf("%w: two webhooks have the same address", ErrInvalid)
		}
		seen[w.URL] = true
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done := make(chan error)
	for _, w := range hooks {
		go func() {
			err := (&Delivery{Journal: j, Webhook: w, Dir: dir, Log: log}).Run(ctx)
			cancel(err)
			done <- err
		}()
	}
	var first error
	for range hooks {
		if err := <-done; first == nil && !errors.Is(err, context.Canceled) {
			first = err
		}
	}
	return first
}

// parseTypes reads a list with commas.
func parseTypes(text string) []string {
	if text == "" {
		return nil
	}
	return strings.Split(text, ",")
}
