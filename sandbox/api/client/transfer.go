package client

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
)

// octets is the header of an upload of any bytes.
func octets() http.Header { return http.Header{"Content-Type": {"application/octet-stream"}} }

// open sends a request, with a body that is read as it goes, whose answer the caller reads, and must close.
func (c *Client) open(ctx context.Context, op, name, method, path string, header http.Header, body io.Reader) (*http.Response, error) {
	if body != nil { // its length is not known, whatever its type
		body = struct{ io.Reader }{body}
	}
	resp, err := c.send(ctx, method, path, header, body)
	if err == nil && resp.StatusCode/100 != 2 {
		err = errorOf(resp)
		resp.Body.Close()
	}
	if err != nil {
		return nil, fail(op, name, err)
	}
	return resp, nil
}

// errorOf reads the error in an answer.
func errorOf(resp *http.Response) error {
	const most = 1 << 20
	text, _ := io.ReadAll(io.LimitReader(resp.Body, most)) // what was cut is no JSON
	return errorIn(resp, text)
}

// download writes the body of an answer to w.
func (c *Client) download(ctx context.Context, op, name, path string, header http.Header, w io.Writer) (int64, error) {
	resp, err := c.open(ctx, op, name, http.MethodGet, path, header, nil)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, err := io.Copy(w, resp.Body)
	return n, fail(op, name, err)
}

// upload sends what r has.
func upload[T any](ctx context.Context, c *Client, op, name, method, path string, header http.Header, r io.Reader) (out T, err error) {
	resp, err := c.open(ctx, op, name, method, path, header, r)
	if err != nil {
		return out, err
	}
	defer resp.Body.Close()
	return out, fail(op, name, json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&out))
}

// maxLine bounds a line of a stream, in bytes.
const maxLine = 4 << 20

// lines calls f for each line of an answer that goes on.
func lines[T any](ctx context.Context, c *Client, op, name, path string, f func(T) error) error {
	resp, err := c.open(ctx, op, name, http.MethodGet, path, nil, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	in := bufio.NewScanner(resp.Body)
	in.Buffer(nil, maxLine)
	for in.Scan() {
		if len(in.Bytes()) == 0 {
			continue
		}
		var v T
		if err := json.Unmarshal(in.Bytes(), &v); err != nil {
			return fail(op, name, fmt.Errorf("reading the server's answer: %w", err))
		}
		if err := f(v); err != nil {
			return err
		}
	}
	return fail(op, name, in.Err())
}
