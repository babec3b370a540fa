"""The ground floor: what every part of the project stands on, and what knows of none of them."""
