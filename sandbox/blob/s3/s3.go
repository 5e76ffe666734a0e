// Package s3 is a store of objects in a bucket of Amazon S3, or of a server that speaks its protocol with conditional
// writes.
package s3

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

// Options say where a bucket is.
type Options struct {
	// Endpoint is the URL of the server, with https or http, without a path. Empty is Amazon's.
	Endpoint string
	Region   string // empty: asked of the server
	Bucket   string
	// Prefix goes before each key, with a slash between; empty is none.
	Prefix string
	// PathStyle puts the bucket into the path of URLs, not into the host name.
	PathStyle bool
	// CA is a file with certificates, PEM, of authorities of the server; empty is the system's.
	CA string
	// Keys is a file of keys with which the caller of Open seals what is in the bucket: see package sealed. Open does not
	// look at it.
	Keys string
	// Credentials sign requests. Nil takes them from where Amazon's own programs do: variables AWS_*, ~/.aws, the role of
	// a Kubernetes service account, of a container or of the machine.
	Credentials *credentials.Credentials
	// Upload and Download bound the bodies of all requests of a Store together, in MiB a second; 0 is no bound.
	Upload, Download int
	// Tries is how often a request is made that the server cannot answer now; 0 is 10.
	Tries int
}

// ErrURL means that a URL is not one of a bucket.
var ErrURL = errors.New("not a bucket")

const amazon = "https://s3.amazonaws.com"

// Parse reads options from a URL: s3://BUCKET/PREFIX, with these parameters, all of them optional: endpoint, region,
// path-style=true, ca, upload-mib, download-mib and keys. It has no secrets in it.
func Parse(text string) (o Options, err error) {
	fail := func(format string, args ...any) (Options, error) {
		return Options{}, fmt.Errorf("%w: %s: write s3://BUCKET/PREFIX?endpoint=URL&region=NAME", ErrURL, fmt.Sprintf(format, args...))
	}
	u, err := url.Parse(text)
	switch {
	case err != nil:
		return fail("it cannot be read") // the error may quote a password
	case u.Scheme != "s3" || u.Host == "":
		return fail("it has no s3:// or no name")
	case u.User != nil:
		return fail("keys are not part of it: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or see Amazon's documentation")
	case u.Fragment != "":
		return fail("%q", "#"+u.Fragment)
	}
	o.Bucket, o.Prefix = u.Host, strings.Trim(u.Path, "/")
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return fail("its parameters cannot be read")
	}
	for name, values := range query {
		if len(values) != 1 {
			return fail("%s is there %d times", name, len(values))
		}
		switch v := values[0]; name {
		case "endpoint":
			o.Endpoint = v
		case "region":
			o.Region = v
		case "ca":
			o.CA = v
		case "keys":
			if v == "" {
				return fail("keys names no file")
			}
			o.Keys = v
		case "path-style":
			if o.PathStyle, err = strconv.ParseBool(v); err != nil {
				return fail("path-style is %q", v)
			}
		case "upload-mib", "download-mib":
			const most = 1 << 20
			mib, err := strconv.Atoi(v)
			if err != nil || mib < 1 || mib > most {
				return fail("%s is %q, and may be 1 to %d, in MiB a second", name, v, most)
			}
			if name == "upload-mib" {
				o.Upload = mib
			} else {
				o.Download = mib
			}
		default:
			return fail("it has no parameter %q", name)
		}
	}
	_, _, err = o.server()
	return o, err
}

// server returns the host of the server, and whether it is asked by TLS.
func (o Options) server() (host string, secure bool, err error) {
	endpoint := o.Endpoint
	if endpoint == "" {
		endpoint = amazon
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
		return "", false, fmt.Errorf("%w: the endpoint must be http://HOST or https://HOST", ErrURL)
	}
	if o.Prefix != "" {
		if err := blob.CheckKey(o.Prefix); err != nil {
			return "", false, fmt.Errorf("%w: its prefix: %w", ErrURL, err)
		}
	}
	return u.Host, u.Scheme == "https", nil
}

// Store is a bucket. The bucket's own versions of objects, if it keeps them, are of no use to it: a rule of the
// bucket's lifecycle should remove them.
type Store struct {
	core   minio.Core
	http   *http.Transport
	bucket string
	prefix string // with a slash at its end, or empty
	up     *pace
	down   *pace
}

// These bound a call: there may be a network that neither answers nor refuses.
const (
	slowest  = 256 << 10 // bytes a second
	patience = 30 * time.Second
)

func bound(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, patience+time.Duration(n/slowest)*time.Second, errSlow)
}

var errSlow = errors.New("the store of objects has not answered in time")

// Open prepares requests to a bucket. It makes none: the bucket need not exist, or be reached, yet.
func Open(o Options) (*Store, error) {
	host, secure, err := o.server()
	if err != nil {
		return nil, err
	}
	tr, err := minio.DefaultTransport(secure)
	if err != nil {
		return nil, err
	}
	if o.CA != "" {
		pem, err := os.ReadFile(o.CA)
		if err != nil {
			return nil, fmt.Errorf("reading the authorities of the store of objects: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("%w: %s has no certificate", ErrURL, o.CA)
		}
		tr.TLSClientConfig = &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
	}
	creds := o.Credentials
	if creds == nil {
		creds = credentials.NewChainCredentials([]credentials.Provider{
			&credentials.EnvAWS{}, &credentials.FileAWSCredentials{}, &credentials.IAM{Client: &http.Client{Transport: tr}},
		})
	}
	lookup := minio.BucketLookupAuto
	if o.PathStyle {
		lookup = minio.BucketLookupPath
	}
	c, err := minio.New(host, &minio.Options{
		Creds: creds, Secure: secure, Transport: tr, Region: o.Region, BucketLookup: lookup, MaxRetries: o.Tries,
	})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrURL, err)
	}
	s := &Store{core: minio.Core{Client: c}, http: tr, bucket: o.Bucket, up: newPace(o.Upload), down: newPace(o.Download)}
	if o.Prefix != "" {
		s.prefix = o.Prefix + "/"
	}
	return s, nil
}

// Close closes connections that no call uses.
func (s *Store) Close() { s.http.CloseIdleConnections() }

// Put implements blob.Store.
func (s *Store) Put(ctx context.Context, key string, body []byte) error {
	if err := blob.CheckPut(key, body); err != nil {
		return err
	}
	var o minio.PutObjectOptions
	o.SetMatchETagExcept("*")
	_, err := s.put(ctx, key, body, o)
	return fail(ctx, "putting", key, err, blob.ErrExists)
}

// tries is how often a request is made whose connection breaks, or a write that the server refuses because it has met
// another one. The library repeats what a server cannot do now.
const tries = 8

func (s *Store) put(ctx context.Context, key string, body []byte, o minio.PutObjectOptions) (etag string, err error) {
	if err := s.up.turn(ctx, len(body)); err != nil {
		return "", err
	}
	ctx, cancel := bound(ctx, len(body))
	defer cancel()
	o.ContentType = "application/octet-stream"
	// The whole body's hash is signed, and not a hash of each piece, also without TLS: some servers keep what is between
	// the pieces.
	o.DisableContentSha256 = true
	sum := sha256.Sum256(body)
	for try := range tries {
		if try > 0 {
			s.up.charge(len(body))
		}
		var info minio.UploadInfo
		info, err = s.core.PutObject(ctx, s.bucket, s.prefix+key, s.up.reader(ctx, bytes.NewReader(body)), int64(len(body)), "", hex.EncodeToString(sum[:]), o)
		if err == nil {
			return info.ETag, nil
		}
		if code := minio.ToErrorResponse(err).StatusCode; code != http.StatusConflict && code != 0 || !pause(ctx, try) {
			break
		}
	}
	return "", err
}

// pause waits before the next try. It reports false if ctx has ended.
func pause(ctx context.Context, try int) bool {
	const first, most = 20 * time.Millisecond, time.Second
	wait := min(first<<try, most)
	select {
	case <-time.After(wait/2 + rand.N(wait/2)):
		return true
	case <-ctx.Done():
		return false
	}
}

// fail gives errors the names of package blob. precondition is what a condition that does not hold means.
func fail(ctx context.Context, doing, key string, err, precondition error) error {
	if err == nil {
		return nil
	}
	r := minio.ToErrorResponse(err)
	switch {
	case ctx.Err() != nil:
		err = errors.Join(context.Cause(ctx), err)
	case errors.Is(err, context.DeadlineExceeded):
		err = fmt.Errorf("%w: %w", errSlow, err)
	case r.Code == minio.NoSuchBucket:
		// Not the object: nothing says that it is gone.
	case r.StatusCode == http.StatusNotFound:
		err = fmt.Errorf("%w (%s)", blob.ErrNotFound, r.Code)
	case r.StatusCode == http.StatusPreconditionFailed && precondition != nil:
		err = precondition
	case r.StatusCode == http.StatusRequestedRangeNotSatisfiable:
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s %s: %w", doing, key, err)
}

// errRange means that a server has sent something else than the range that it was asked for.
var errRange = errors.New("the server of objects has sent another range")

// ReadAt implements blob.Store.
func (s *Store) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := blob.CheckRead(key, off); err != nil {
		return err
	}
	if err := s.down.turn(ctx, len(p)); err != nil {
		return fail(ctx, "reading", key, err, nil)
	}
	within, cancel := bound(ctx, len(p))
	defer cancel()
	again := false
	return fail(ctx, "reading", key, s.again(within, func() error {
		if again {
			s.down.charge(len(p))
		}
		again = true
		return s.readAt(within, key, p, off)
	}), nil)
}

// again repeats a request whose answer broke off.
func (s *Store) again(ctx context.Context, request func() error) (err error) {
	for try := range tries {
		err = request()
		if transport := new(url.Error); err == nil || !errors.Is(err, errBroken) && !errors.As(err, &transport) || !pause(ctx, try) {
			break
		}
	}
	return err
}

// errBroken means that an answer ended before its end.
var errBroken = errors.New("the answer broke off")

func (s *Store) readAt(ctx context.Context, key string, p []byte, off int64) error {
	if len(p) == 0 {
		_, err := s.core.StatObject(ctx, s.bucket, s.prefix+key, minio.StatObjectOptions{})
		return refusal(err)
	}
	var o minio.GetObjectOptions
	if err := o.SetRange(off, off+int64(len(p))-1); err != nil {
		return err
	}
	body, _, header, err := s.core.GetObject(ctx, s.bucket, s.prefix+key, o)
	if err != nil {
		return refusal(err)
	}
	defer body.Close()
	var first, last, size int64
	if r := header.Get("Content-Range"); r != "" || off != 0 {
		_, err := fmt.Sscanf(r, "bytes %d-%d/%d", &first, &last, &size)
		switch want := off + int64(len(p)) - 1; {
		case err != nil, first != off, last > want, last < want && last != size-1:
			return fmt.Errorf("%w: %.60q for %d bytes at %d", errRange, r, len(p), off)
		case last < want:
			return io.ErrUnexpectedEOF // all there is
		}
	} else if n, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64); err == nil && n < int64(len(p)) {
		return io.ErrUnexpectedEOF
	}
	if _, err := io.ReadFull(body, p); err != nil {
		return fmt.Errorf("%w: %w", errBroken, notEOF(err))
	}
	return nil
}

// refusal returns the error of a request. If what the server said broke off, minio returns the bare error of the read.
func refusal(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", errBroken, notEOF(err))
	}
	return err
}

// notEOF keeps a broken answer from looking like the end of an object.
func notEOF(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("the connection was closed")
	}
	return err
}

// Load implements blob.Store.
func (s *Store) Load(ctx context.Context, key string, limit int64) (body []byte, v blob.Version, err error) {
	if err := blob.CheckKey(key); err != nil {
		return nil, "", err
	}
	within, cancel := bound(ctx, int(min(limit, blob.MaxObject)))
	defer cancel()
	err = s.again(within, func() error {
		body, v, err = s.load(within, key, limit)
		s.down.charge(len(body)) // its size was not known
		return err
	})
	if err != nil {
		return nil, "", fail(ctx, "loading", key, err, nil)
	}
	return body, v, nil
}

func (s *Store) load(ctx context.Context, key string, limit int64) ([]byte, blob.Version, error) {
	r, info, _, err := s.core.GetObject(ctx, s.bucket, s.prefix+key, minio.GetObjectOptions{})
	if err != nil {
		return nil, "", refusal(err)
	}
	defer r.Close()
	if info.Size > limit {
		return nil, "", fmt.Errorf("%w: it has %d bytes, and %d are allowed", blob.ErrKey, info.Size, limit)
	}
	body, err := io.ReadAll(io.LimitReader(r, limit+1))
	switch {
	case err != nil:
		return nil, "", fmt.Errorf("%w: %w", errBroken, notEOF(err))
	case int64(len(body)) > limit:
		return nil, "", fmt.Errorf("%w: it has more than %d bytes", blob.ErrKey, limit)
	case info.Size >= 0 && int64(len(body)) != info.Size:
		return nil, "", fmt.Errorf("%w: %d bytes of %d", errBroken, len(body), info.Size)
	}
	if info.ETag == "" {
		return nil, "", errNoETag
	}
	return body, blob.Version(info.ETag), nil
}

var errNoETag = errors.New("the server of objects gives no ETag: drowse cannot use it")

// Swap implements blob.Store.
func (s *Store) Swap(ctx context.Context, key string, old blob.Version, body []byte) (blob.Version, error) {
	if err := blob.CheckPut(key, body); err != nil {
		return "", err
	}
	var o minio.PutObjectOptions
	if old == "" {
		o.SetMatchETagExcept("*")
	} else {
		o.SetMatchETag(string(old))
	}
	etag, err := s.put(ctx, key, body, o)
	if code := minio.ToErrorResponse(err).StatusCode; err != nil && (code == http.StatusConflict || code == http.StatusNotFound && minio.ToErrorResponse(err).Code != minio.NoSuchBucket) {
		return "", fmt.Errorf("swapping %s: %w", key, blob.ErrChanged)
	}
	if err == nil && etag == "" {
		err = errNoETag
	}
	if err != nil {
		return "", fail(ctx, "swapping", key, err, blob.ErrChanged)
	}
	return blob.Version(etag), nil
}

// Delete implements blob.Store.
func (s *Store) Delete(ctx context.Context, key string) error {
	if err := blob.CheckKey(key); err != nil {
		return err
	}
	within, cancel := bound(ctx, 0)
	defer cancel()
	err := fail(ctx, "deleting", key, s.again(within, func() error {
		return refusal(s.core.RemoveObject(within, s.bucket, s.prefix+key, minio.RemoveObjectOptions{}))
	}), nil)
	if errors.Is(err, blob.ErrNotFound) {
		return nil
	}
	return err
}

// List implements blob.Store.
func (s *Store) List(ctx context.Context, prefix string, each func(blob.Info) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	after := ""
	for {
		var objects []minio.ObjectInfo
		err := s.again(ctx, func() (err error) {
			objects, err = s.listPage(ctx, prefix, after)
			return err
		})
		if err == nil && ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			return fail(ctx, "listing", prefix, err, nil)
		}
		for _, o := range objects {
			key, ok := strings.CutPrefix(o.Key, s.prefix)
			if !ok || blob.CheckKey(key) != nil {
				continue // no object of a store
			}
			if err := each(blob.Info{Key: key, Size: o.Size, Changed: o.LastModified}); err != nil {
				return err
			}
		}
		if len(objects) < page {
			return nil
		}
		after = objects[page-1].Key
	}
}

// page is how many objects a server tells of in one answer. List repeats the request for as many.
const page = 1000

// listPage returns the first objects whose keys come after one of the server's, or from the first on.
func (s *Store) listPage(ctx context.Context, prefix, after string) (objects []minio.ObjectInfo, err error) {
	for o := range s.core.ListObjectsIter(ctx, s.bucket, minio.ListObjectsOptions{Prefix: s.prefix + prefix, Recursive: true, StartAfter: after}) {
		switch {
		case o.Err != nil:
			return nil, refusal(o.Err)
		case after != "" && o.Key <= after:
			return nil, errOrder
		}
		if objects = append(objects, o); len(objects) == page {
			break
		}
	}
	return objects, nil
}

// errOrder means that a server tells of objects again, which would not end.
var errOrder = errors.New("the server of objects does not list keys in their order: drowse cannot use it")
