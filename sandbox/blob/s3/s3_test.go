package s3

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"

	"github.com/minio/minio-go/v7/pkg/credentials"

	"github.com/drowse-vm/drowse/sandbox/blob"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		name, url string
		want      Options
		bad       bool
	}{
		{name: "a bucket of Amazon", url: "s3://bucket", want: Options{Bucket: "bucket"}},
		{name: "all of it", url: "s3://bucket/a/b/?endpoint=http://127.0.0.1:7070&region=eu&path-style=true&ca=/etc/ca.pem",
			want: Options{Bucket: "bucket", Prefix: "a/b", Endpoint: "http://127.0.0.1:7070", Region: "eu", PathStyle: true, CA: "/etc/ca.pem"}},
		{name: "bounds of bodies", url: "s3://bucket?upload-mib=20&download-mib=1", want: Options{Bucket: "bucket", Upload: 20, Download: 1}},
		{name: "keys", url: "s3://bucket?keys=/etc/drowse/keys", want: Options{Bucket: "bucket", Keys: "/etc/drowse/keys"}},
		{name: "keys without a file", url: "s3://bucket?keys=", bad: true},
		{name: "no bytes a second", url: "s3://bucket?upload-mib=0", bad: true},
		{name: "bytes a second of another kind", url: "s3://bucket?download-mib=1e3", bad: true},
		{name: "no bucket", url: "s3:///a", bad: true},
		{name: "another scheme", url: "gs://bucket", bad: true},
		{name: "with keys", url: "s3://key:secret@bucket", bad: true},
		{name: "unknown parameter", url: "s3://bucket?acl=public", bad: true},
		{name: "parameter twice", url: "s3://bucket?region=a&region=b", bad: true},
		{name: "no yes or no", url: "s3://bucket?path-style=perhaps", bad: true},
		{name: "fragment", url: "s3://bucket#x", bad: true},
		{name: "prefix that is no key", url: "s3://bucket/a//b", bad: true},
		{name: "prefix that leads out", url: "s3://bucket/../b", bad: true},
		{name: "endpoint without scheme", url: "s3://bucket?endpoint=host:7070", bad: true},
		{name: "endpoint with a path", url: "s3://bucket?endpoint=https://host/path", bad: true},
		{name: "endpoint with keys", url: "s3://bucket?endpoint=https://key:secret@host", bad: true},
		{name: "control characters", url: "s3://bucket/\x01secret", bad: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := Parse(tt.url)
			if tt.bad != errors.Is(err, ErrURL) || !tt.bad && (err != nil || got != tt.want) {
				t.Errorf("got %+v, %v", got, err)
			}
			if err != nil && strings.Contains(err.Error(), "secret@") {
				t.Errorf("the error tells a secret: %v", err)
			}
		})
	}
}

func brokenRefusal(w http.ResponseWriter) {
	w.Header().Set("Content-Length", "100")
	w.WriteHeader(http.StatusNotFound)
	_, _ = io.WriteString(w, "<Error><Code>NoSuchKey")
	_ = http.NewResponseController(w).Flush()
	panic(http.ErrAbortHandler)
}

func TestStore_refuses_answers_that_a_server_should_not_give(t *testing.T) {
	const etag = `"abc"`
	for _, tt := range []struct {
		name   string
		answer func(w http.ResponseWriter)
		read   bool
		want   error
		not    error
	}{
		{name: "the whole object for a range", read: true, want: errRange, answer: func(w http.ResponseWriter) {
			w.Header().Set("ETag", etag)
			_, _ = io.WriteString(w, "0123456789")
		}},
		{name: "another range", read: true, want: errRange, answer: func(w http.ResponseWriter) {
			w.Header().Set("ETag", etag)
			w.Header().Set("Content-Range", "bytes 0-3/10")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = io.WriteString(w, "0123")
		}},
		{name: "a part of the range, which is not the object's end", read: true, want: errRange, answer: func(w http.ResponseWriter) {
			w.Header().Set("ETag", etag)
			w.Header().Set("Content-Range", "bytes 2-3/10")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = io.WriteString(w, "23")
		}},
		{name: "the range up to the object's end", read: true, want: io.ErrUnexpectedEOF, answer: func(w http.ResponseWriter) {
			w.Header().Set("ETag", etag)
			w.Header().Set("Content-Range", "bytes 2-3/4")
			w.WriteHeader(http.StatusPartialContent)
			_, _ = io.WriteString(w, "23")
		}},
		{name: "no bucket is no missing object", read: true, not: blob.ErrNotFound, answer: func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `<Error><Code>NoSuchBucket</Code></Error>`)
		}},
		{name: "a missing object", read: true, want: blob.ErrNotFound, answer: func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/xml")
			w.WriteHeader(http.StatusNotFound)
			_, _ = io.WriteString(w, `<Error><Code>NoSuchKey</Code></Error>`)
		}},
		{name: "a refusal that breaks off is no end of an object", read: true, want: errBroken, not: io.ErrUnexpectedEOF, answer: brokenRefusal},
		{name: "a refusal that breaks off says nothing", want: errBroken, not: io.ErrUnexpectedEOF, answer: brokenRefusal},
		{name: "keys that are refused are no missing object", read: true, not: blob.ErrNotFound, answer: func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusForbidden)
		}},
		{name: "an object without a version", want: errNoETag, answer: func(w http.ResponseWriter) { _, _ = io.WriteString(w, "0123") }},
		{name: "more than was allowed", want: blob.ErrKey, answer: func(w http.ResponseWriter) {
			w.Header().Set("ETag", etag)
			_, _ = io.WriteString(w, strings.Repeat("x", 101))
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Last-Modified", "Thu, 26 Nov 2026 10:00:00 GMT")
				tt.answer(w)
			}))
			defer server.Close()
			s, err := Open(Options{Endpoint: server.URL, Region: "r", Bucket: "bucket", PathStyle: true, Credentials: credentials.NewStaticV4("k", "s", ""), Tries: 1})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if tt.read {
				err = s.ReadAt(t.Context(), "a", make([]byte, 4), 2)
			} else {
				_, _, err = s.Load(t.Context(), "a", 100)
			}
			if err == nil || tt.want != nil && !errors.Is(err, tt.want) || tt.not != nil && errors.Is(err, tt.not) {
				t.Errorf("got %v", err)
			}
		})
	}
}

// Of 2,500 objects a server tells in three answers, each of which breaks off once, and the connection before it.
func TestStore_lists_each_object_once_when_answers_break_off(t *testing.T) {
	const objects = 2500
	asked := map[string]int{}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		after, token := r.FormValue("start-after"), r.FormValue("continuation-token")
		if asked[after+token]++; asked[after+token] == 1 {
			panic(http.ErrAbortHandler)
		}
		first := 0
		if last := max(after, token); last != "" {
			first, _ = strconv.Atoi(strings.TrimPrefix(last, "prefix/o/"))
			first++
		}
		var b strings.Builder
		end := min(first+1000, objects)
		fmt.Fprintf(&b, "<ListBucketResult><IsTruncated>%v</IsTruncated>", end < objects)
		for i := first; i < end; i++ {
			fmt.Fprintf(&b, "<Contents><Key>prefix/o/%04d</Key><Size>%d</Size><LastModified>2026-11-28T10:00:00Z</LastModified></Contents>", i, i)
		}
		fmt.Fprintf(&b, "<NextContinuationToken>prefix/o/%04d</NextContinuationToken></ListBucketResult>", end-1)
		w.Header().Set("Content-Length", strconv.Itoa(b.Len()))
		if asked[after+token] == 2 {
			_, _ = io.WriteString(w, b.String()[:b.Len()/2])
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(w, b.String())
	}))
	defer server.Close()
	s, err := Open(Options{Endpoint: server.URL, Region: "r", Bucket: "bucket", Prefix: "prefix", PathStyle: true, Credentials: credentials.NewStaticV4("k", "s", ""), Tries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	n, mine := 0, errors.New("the caller's own")
	each := func(o blob.Info) error {
		if want := fmt.Sprintf("o/%04d", n); o.Key != want || o.Size != int64(n) {
			t.Fatalf("object %d is %+v", n, o)
		}
		n++
		return nil
	}
	if err := s.List(t.Context(), "o/", each); err != nil || n != objects {
		t.Errorf("%d objects, %v", n, err)
	}
	n = 0
	err = s.List(t.Context(), "o/", func(blob.Info) error {
		n++
		return fmt.Errorf("%w: %w", errBroken, mine)
	})
	if n != 1 || !errors.Is(err, mine) {
		t.Errorf("a caller that fails was called %d times: %v", n, err)
	}
}

func TestStore_gives_up_a_server_that_lists_objects_again(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "<ListBucketResult>")
		for i := range 1000 {
			fmt.Fprintf(w, "<Contents><Key>%04d</Key><LastModified>2026-11-28T10:00:00Z</LastModified></Contents>", i)
		}
		_, _ = io.WriteString(w, "</ListBucketResult>")
	}))
	defer server.Close()
	s, err := Open(Options{Endpoint: server.URL, Region: "r", Bucket: "bucket", PathStyle: true, Credentials: credentials.NewStaticV4("k", "s", "")})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := s.List(t.Context(), "", func(blob.Info) error { return nil }); !errors.Is(err, errOrder) {
		t.Errorf("got %v", err)
	}
}
