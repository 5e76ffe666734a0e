package ledger_test

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/archive/ledger"
)

// What is in a store may come from anyone who can write to it.
func FuzzRecords(f *testing.F) {
	for _, s := range []string{
		`{"version":1,"counter":3,"fence":1,"head":"s1","holder":{"host":"a","incarnation":"i","claim":"c"},"snapshots":{"s1":{"state":"kept","uploads":["u1","u2"]},"s2":{"state":"intent","fence":1}}}`,
		`{"version":1,"counter":9,"deleted":true,"fence":2}`,
		`{"version":1,"incarnation":"i","counter":7,"ttl_ms":30000,"ended":true}`,
		`{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a:1","key":"0000000000000000000000000000000000000000000000000000000000000000"}`,
		`{"version":2}`,
		`{"version":1,"counter":1,"counter":2,"fence":0}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		_ = ledger.DecodeHost(body)
		family, err := ledger.DecodeFamily(body)
		if err != nil {
			return
		}
		again, err := json.Marshal(family)
		if err != nil || !bytes.Equal(again, body) {
			t.Errorf("%s became %s, %v", body, again, err)
		}
		if f := family; f.Head != "" && f.Snapshots[f.Head].State != ledger.Kept {
			t.Error("the head is not kept")
		}
	})
}

func TestRecord_of_a_host_that_is_not_as_written_is_refused(t *testing.T) {
	const key = `"0000000000000000000000000000000000000000000000000000000000000000"`
	for name, body := range map[string]string{
		"an address in version 1":    `{"version":1,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a:1","key":` + key + `}`,
		"no address in version 2":    `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000}`,
		"an address without a key":   `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a:1"}`,
		"an address that is a path":  `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a/b:1","key":` + key + `}`,
		"an address without a port":  `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a","key":` + key + `}`,
		"a version that is to come":  `{"version":3,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a:1","key":` + key + `}`,
		"no version":                 `{"incarnation":"i","counter":7,"ttl_ms":30000}`,
		"a key that is not a digest": `{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"a:1","key":"00"}`,
	} {
		if err := ledger.DecodeHost([]byte(body)); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
	if err := ledger.DecodeHost([]byte(`{"version":2,"incarnation":"i","counter":7,"ttl_ms":30000,"address":"[::1]:7400","key":` + key + `}`)); err != nil {
		t.Error(err)
	}
}

func TestRecords_that_are_not_as_written_are_refused(t *testing.T) {
	for name, body := range map[string]string{
		"nothing":            ``,
		"a name twice":       `{"version":1,"counter":1,"counter":1,"fence":0}`,
		"an unknown name":    `{"version":1,"counter":1,"fence":0,"x":1}`,
		"another case":       `{"version":1,"Counter":1,"fence":0}`,
		"something behind":   `{"version":1,"counter":1,"fence":0} `,
		"a newer version":    `{"version":2,"counter":1,"fence":0}`,
		"no head":            `{"version":1,"counter":1,"fence":0,"head":"s"}`,
		"a head that is not": `{"version":1,"counter":1,"fence":1,"head":"s","snapshots":{"s":{"state":"gone"}}}`,
		"no order":           `{"version":1,"counter":1,"fence":1,"snapshots":{"s":{"state":"kept","uploads":["b","a"]}}}`,
		"a path":             `{"version":1,"counter":1,"fence":1,"snapshots":{"s":{"state":"kept","uploads":["../a"]}}}`,
		"an end of counts":   `{"version":1,"counter":18446744073709551615,"fence":0}`,
		"deleted and held":   `{"version":1,"counter":1,"deleted":true,"fence":1,"holder":{"host":"a","incarnation":"i","claim":"c"}}`,
		"an unknown state":   `{"version":1,"counter":1,"fence":1,"snapshots":{"s":{"state":"x"}}}`,
	} {
		if _, err := ledger.DecodeFamily([]byte(body)); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}
