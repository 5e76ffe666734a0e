package spec

import "errors"

// FieldError is an error that one field of a document or request has caused.
type FieldError struct {
	// Field is its name in JSON, below those of the objects that it is in: "idle.sleep_seconds". Only lists of policies
	// have an index.
	Field string
	Err   error
}

// Error returns the text of the cause.
func (e *FieldError) Error() string { return e.Err.Error() }

// Unwrap returns the cause.
func (e *FieldError) Unwrap() error { return e.Err }

// FieldName returns Field. Errors of packages that cannot import this one have such a method.
func (e *FieldError) FieldName() string { return e.Field }

// InField returns err with the field that has caused it, or nil. A field that err has already is in this one.
func InField(field string, err error) error {
	if err == nil {
		return nil
	}
	if inner := FieldOf(err); inner != "" {
		field += "." + inner
	}
	return &FieldError{field, err}
}

// InObject puts the field that err has, if it has one, into an object.
func InObject(object string, err error) error {
	if FieldOf(err) == "" {
		return err
	}
	return InField(object, err)
}

// FieldOf returns the field that has caused err, or "" if no single one is known.
func FieldOf(err error) string {
	var in interface {
		error
		FieldName() string
	}
	if errors.As(err, &in) {
		return in.FieldName()
	}
	return ""
}
